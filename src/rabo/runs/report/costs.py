"""What every client spent, by phase."""

from collections.abc import Callable

from rabo.runs.report.figures import COLOURS, Chart, layout_of, plain, words
from rabo.runs.report.runs import Run, Spent


def cost_charts(run: Run) -> list[Chart]:
    """What every client spent, by phase."""
    return (
        [
            _bars(
                run, "multiply-adds by client and phase", "multiply-adds", lambda s: s.multiply_adds
            ),
            _bars(run, "bytes by client and phase", "bytes", lambda s: s.bytes),
        ]
        if run.costs
        else []
    )


def _bars(run: Run, title: str, unit: str, of: Callable[[Spent], float]) -> Chart:
    phases = list(dict.fromkeys(phase for _, phase in run.costs))
    clients = sorted({client for client, _ in run.costs})
    nothing = Spent(0, 0)
    data = [
        {
            "type": "bar",
            "name": plain(words(phase)),
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
