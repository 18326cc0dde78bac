"""What methods have reached within the cost of another: a round of one costs many of another's."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import nan
from statistics import fmean
from typing import Any, NamedTuple

from rabo.reproduction.grid import Grid
from rabo.reproduction.records import Difference, Record, grouped, pairs_of, spread
from rabo.runs.comparison import confidence

COSTS: Mapping[str, Callable[[Mapping[str, Any]], float]] = {  # of what was spent
    "multiply-adds": lambda spent: spent["multiply_adds"],
    "bytes": lambda spent: spent["bytes_up"] + spent["bytes_down"],
}
CLOSE = 0.005  # a cost so close to another is as much


class Reached(NamedTuple):
    """An accuracy in per cent within some cost, and its 95 % interval."""

    setting: str
    method: str
    within: str  # one of COSTS
    value: float
    interval: float | None
    interval_over: str  # "seeds", or with one seed "test tasks"
    spent: float  # over that cost


class Point(NamedTuple):
    """One evaluation, or a place between two, and what was spent before it."""

    spent: float
    value: float
    interval: float | None


def within(record: Record, cost: float, what: str) -> Point | None:
    """Return where a run is when it has spent as much; None if it was never evaluated.

    On the straight line between two evaluations, with the interval of the later one; of a run that
    spends less, its end; of one whose first evaluation comes later, that evaluation.
    """
    points = [_point(point, record.headline, what) for point in record.curve]
    if not points:
        return None
    if cost < points[0].spent:
        return points[0]
    for before, after in pairwise(points):
        if before.spent <= cost < after.spent:
            share = (cost - before.spent) / (after.spent - before.spent)
            value = before.value + share * (after.value - before.value)
            return Point(cost, value, after.interval)
    return points[-1]


def _point(point: Mapping[str, Any], headline: str, what: str) -> Point:
    metrics = point["metrics"]
    interval = 100 * metrics["interval"] if "interval" in metrics else None
    return Point(COSTS[what](point["spent"]), 100 * metrics[headline], interval)


def ahead(own: Sequence[Record], other: Sequence[Record], what: str) -> Difference | None:
    """Return how far a method is above another that has spent as much, over common seeds."""
    gaps = [
        a.value - there.value
        for a, b in pairs_of(own, other)
        if (there := within(b, COSTS[what](a.summary["cost"]), what)) is not None
    ]
    if not gaps:
        return None
    return Difference(fmean(gaps), confidence(gaps) if len(gaps) > 1 else nan, len(gaps))


def equal_work(grid: Grid, records: Sequence[Record]) -> list[Reached]:
    """Return what methods reach within each cost of the grid's `work_of`, where it is known."""
    groups = {key: own for key, own in grouped(records).items() if not any(r.diverged for r in own)}
    found = []
    for what, cost_of in COSTS.items():
        for setting in grid.settings:
            base = groups.get((setting, grid.content["work_of"]))
            if not base:
                continue
            cost = fmean(cost_of(record.summary["cost"]) for record in base)
            for method in grid.methods(setting):
                reached = [within(r, cost, what) for r in groups.get((setting, method), [])]
                points = [point for point in reached if point is not None]
                if points and len(points) == len(reached):
                    found.append(Reached(setting, method, what, *_mean(points, cost)))
    return found


def _mean(points: Sequence[Point], cost: float) -> tuple[float, float | None, str, float]:
    """Return the mean of some seeds, its interval, what that is over, and what was spent."""
    values = [point.value for point in points]
    _, interval, over = spread(values)
    if len(points) == 1:
        interval, over = points[0].interval, "test tasks"
    return fmean(values), interval, over, fmean(point.spent for point in points) / cost


def equal_work_table(grid: Grid, records: Sequence[Record]) -> str:
    """Return, for each cost, a row per method and a column per setting."""
    found = {(each.setting, each.method, each.within): each for each in equal_work(grid, records)}
    if not found:
        return "Not run yet."
    begun = {record.run.method for record in records}
    settings = [s for s in grid.settings if any(setting == s for setting, *_ in found)]
    lines = []
    for what in COSTS:
        labels = [grid.settings[setting].get("label", setting) for setting in settings]
        lines += ["", f"Within the {what}:", ""] if lines else [f"Within the {what}:", ""]
        lines += [_row(["", *labels]), _row(["---"] * (1 + len(labels)))]
        for method, about in grid.methods(settings[0]).items():
            if method in begun:
                cells = [_text(found.get((setting, method, what))) for setting in settings]
                lines.append(_row([about["label"], *cells]))
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _text(reached: Reached | None) -> str:
    if reached is None:
        return "–"
    interval, mark = "", "" if reached.interval_over == "seeds" else "*"
    if reached.interval is not None:
        interval = f" ± {reached.interval:.2f}{mark}"
    close = abs(reached.spent - 1) <= CLOSE
    return f"{reached.value:.2f}{interval}" + ("" if close else f" (at {reached.spent:.2f})")
