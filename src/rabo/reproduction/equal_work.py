"""What methods have reached within the work of another: a round of one costs many of another's."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

from rabo.reproduction.grid import Grid
from rabo.reproduction.records import Record, grouped, spread


class Reached(NamedTuple):
    """An accuracy in per cent within some work, and its 95 % interval."""

    setting: str
    method: str
    value: float
    interval: float | None
    interval_over: str  # "seeds", or with one seed "test tasks"


class _Point(NamedTuple):
    """One evaluation, and the multiply-adds that were spent before it."""

    spent: float
    value: float
    interval: float | None


def within(record: Record, work: float) -> tuple[float, float | None] | None:
    """Return the accuracy in per cent within some multiply-adds, and its interval over test tasks.

    On the straight line between two evaluations, with the interval of the later one; of a run that
    spends less, its end; None before the first evaluation.
    """
    points = [_point(point, record.headline) for point in record.curve]
    if points and points[-1].spent <= work:
        return points[-1].value, points[-1].interval
    for before, after in pairwise(points):
        if before.spent <= work < after.spent:
            share = (work - before.spent) / (after.spent - before.spent)
            return before.value + share * (after.value - before.value), after.interval
    return None


def _point(point: Mapping[str, Any], headline: str) -> _Point:
    metrics = point["metrics"]
    interval = 100 * metrics["interval"] if "interval" in metrics else None
    return _Point(point["spent"]["multiply_adds"], 100 * metrics[headline], interval)


def equal_work(grid: Grid, records: Sequence[Record]) -> list[Reached]:
    """Return what methods reach within the work of the grid's `work_of`, where it is known."""
    groups = grouped([record for record in records if not record.diverged])
    own = grid.content["work_of"]
    work = {s: fmean(r.multiply_adds for r in g) for (s, m), g in groups.items() if m == own}
    found = []
    for setting in work:
        for method in grid.methods(setting):
            reached = [within(r, work[setting]) for r in groups.get((setting, method), [])]
            if not reached or None in reached:
                continue
            values = [each[0] for each in reached if each is not None]
            _, interval, over = spread(values)
            if len(reached) == 1 and reached[0] is not None:
                interval, over = reached[0][1], "test tasks"
            found.append(Reached(setting, method, fmean(values), interval, over))
    return found


def equal_work_table(grid: Grid, records: Sequence[Record]) -> str:
    """Return a row per method and a column per setting."""
    found = {(each.setting, each.method): each for each in equal_work(grid, records)}
    if not found:
        return "Not run yet."
    begun = {record.run.method for record in records}
    settings = [s for s in grid.settings if any(setting == s for setting, _ in found)]
    lines = [["", *(grid.settings[setting].get("label", setting) for setting in settings)]]
    lines.append(["---"] * len(lines[0]))
    for method, about in grid.methods(settings[0]).items():
        if method in begun:
            cells = [_text(found.get((setting, method))) for setting in settings]
            lines.append([about["label"], *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(reached: Reached | None) -> str:
    if reached is None:
        return "–"
    if reached.interval is None:
        return f"{reached.value:.2f}"
    mark = "*" if reached.interval_over != "seeds" else ""
    return f"{reached.value:.2f} ± {reached.interval:.2f}{mark}"
