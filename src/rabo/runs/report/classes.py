"""Charts of a tuned loss, class by class."""

from rabo.runs.plots import BLUE, ORANGE
from rabo.runs.report.figures import Chart, count_of, layout_over_rounds, words
from rabo.runs.report.runs import Run, numbers


def loss_charts(run: Run) -> list[Chart]:
    """Draw the parameters of a tuned loss and the accuracy on each class, over rounds."""
    counts = dict(enumerate(numbers(run.loss, "class_counts")))
    charts = []
    for name, title in (
        ("w", "w, the weight of each class"),
        ("l", "l, the offset of each class"),
        ("delta", "Δ, the scale of each class"),
        ("accuracy_per_class", "accuracy on each class"),
    ):
        found = run.vectors(name)
        if not found:
            continue
        num_classes = max(len(values) for _, values in found)
        data = [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": f"class {k}" + (f" ({n:.0f})" if (n := counts.get(k)) is not None else ""),
                "x": [round for round, _ in found],
                "y": [values[k] if k < len(values) else None for _, values in found],
                "line": {"color": _ramp(k, num_classes), "width": 1.5},
                "marker": {"size": 4},
            }
            for k in range(num_classes)
        ]
        about = f"{title}, at {count_of(len(found), 'evaluation')}; classes from the first, blue, "
        about += "to the last, orange"
        about += "; in brackets: training images." if counts else "."
        layout = layout_over_rounds((round for round, _ in found), words(name))
        charts.append(Chart(title, about, data, layout))
    return charts


def _ramp(k: int, number_of: int) -> str:
    """Return a colour between blue and orange."""
    share = k / max(1, number_of - 1)
    blue, orange = (tuple(bytes.fromhex(colour[1:])) for colour in (BLUE, ORANGE))
    mixed = (round(a + share * (b - a)) for a, b in zip(blue, orange, strict=True))
    return f"rgb({','.join(map(str, mixed))})"
