"""Charts of the costs of every client, by phase."""

from collections.abc import Callable

from rabo.runs.plots import COLOURS
from rabo.runs.report.figures import Chart, layout_of, words
from rabo.runs.report.runs import Run, Spent


def cost_charts(run: Run) -> list[Chart]:
    """Draw multiply-adds and bytes: a bar per client, with a part per phase."""
    if not run.costs:
        return []
    title = "multiply-adds by client and phase"
    work = _bars(run, title, "multiply-adds", lambda spent: spent.multiply_adds)
    return [work, _bars(run, "bytes by client and phase", "bytes", lambda spent: spent.bytes)]


def _bars(run: Run, title: str, unit: str, of: Callable[[Spent], float]) -> Chart:
    phases = list(dict.fromkeys(phase for _, phase in run.costs))
    clients = sorted({client for client, _ in run.costs})
    nothing = Spent(0, 0)
    data = [
        {
            "type": "bar",
            "name": words(phase),
            "x": [str(client) for client in clients],
            "y": [of(run.costs.get((client, phase), nothing)) for client in clients],
            "marker": {"color": COLOURS[i % len(COLOURS)]},
        }
        for i, phase in enumerate(phases)
    ]
    layout = layout_of("client", unit, x_type="category")
    sums = {p: sum(of(s) for (_, phase), s in run.costs.items() if phase == p) for p in phases}
    whole = max(1.0, sum(sums.values()))
    about = "; ".join(f"{words(phase)} {value / whole:.0%}" for phase, value in sums.items())
    return Chart(title, f"Of all {unit} of rounds: {about}.", data, {**layout, "barmode": "stack"})
