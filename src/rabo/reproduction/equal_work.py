"""What methods have reached within the work of another: a round of one costs many of another's."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from rabo.reproduction.grid import Grid
from rabo.reproduction.records import Record, grouped


def within(record: Record, work: float) -> tuple[float, float | None] | None:
    """Return the accuracy in per cent within some multiply-adds, and its interval over test tasks.

    On the straight line between two evaluations, with the interval of the later one; of a run that
    spends less, its end; None before the first evaluation.
    """
    points = [_Point(point, record.headline) for point in record.curve]
    if points[-1].spent <= work:
        return points[-1].value, points[-1].interval
    for before, after in pairwise(points):
        if before.spent <= work < after.spent:
            share = (work - before.spent) / (after.spent - before.spent)
            return before.value + share * (after.value - before.value), after.interval
    return None


class _Point:
    """One evaluation, and the multiply-adds that were spent before it."""

    def __init__(self, point: Mapping, headline: str):
        self.spent, metrics = point["spent"]["multiply_adds"], point["metrics"]
        self.value = 100 * metrics[headline]
        self.interval = 100 * metrics["interval"] if "interval" in metrics else None


def equal_work_table(grid: Grid, records: Sequence[Record]) -> str:
    """Return a row per method and a column per setting, within the work of the grid's `work_of`."""
    groups = grouped([record for record in records if not record.diverged])
    own = grid.content["work_of"]
    work = {s: fmean(r.multiply_adds for r in g) for (s, m), g in groups.items() if m == own}
    if not work:
        return "Not run yet."
    labels = {m: about["label"] for s in work for m, about in grid.methods(s).items()}
    begun = [m for m in labels if any((setting, m) in groups for setting in work)]
    lines = [["", *(grid.settings[setting].get("label", setting) for setting in work)]]
    lines.append(["---"] * len(lines[0]))
    for method in begun:
        cells = [_cell(groups.get((setting, method), []), work[setting]) for setting in work]
        lines.append([labels[method], *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(records: Sequence[Record], work: float) -> str:
    found = [each for record in records if (each := within(record, work)) is not None]
    if not found or len(found) < len(records):
        return "–"
    mean, interval = fmean(value for value, _ in found), found[0][1]
    return f"{mean:.2f} ± {interval:.2f}*" if len(found) == 1 and interval else f"{mean:.2f}"
