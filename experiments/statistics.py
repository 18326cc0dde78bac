"""Means over seeds with their intervals, differences, and values within a cost."""

from bisect import bisect_right
from collections.abc import Sequence
from math import hypot, isfinite, nan
from statistics import fmean
from typing import NamedTuple

from experiments.records import Record
from rabo.runs.comparison import confidence

COSTS = ("multiply_adds", "bytes")


class Mean(NamedTuple):
    """A mean over seeds with its 95 % interval; None if a run diverged."""

    value: float | None
    interval: float | None = None
    over_tasks: bool = False  # the interval of one seed is over test tasks


class Difference(NamedTuple):
    """A difference of two methods with its 95 % interval, over the seeds of both."""

    value: float
    interval: float  # NaN if there is one seed without an interval over test tasks
    num_seeds: int


class Reached(NamedTuple):
    """The value of a run within a cost."""

    value: float
    interval: float | None  # over test tasks
    spent: float


def mean_of(records: Sequence[Record]) -> Mean:
    """Return the mean of the headline: over seeds by Student's t, of one seed over test tasks."""
    if any(record.diverged for record in records):
        return Mean(None)
    if len(records) == 1:
        return Mean(records[0].value, records[0].interval, over_tasks=True)
    values = [record.value for record in records]
    return Mean(fmean(values), confidence(values))


def full_model(records: Sequence[Record]) -> float | None:
    """Return the mean accuracy of the full model, if untrained entries make it another one."""
    found = [record.metrics.get("full_accuracy") for record in records]
    known = [100 * each for each in found if each is not None]
    value = mean_of(records).value
    if not known or value is None or abs(fmean(known) - value) <= 5e-3:
        return None
    return fmean(known)


def difference(own: Sequence[Record], other: Sequence[Record]) -> Difference | None:
    """Return the mean of own − other over common seeds.

    The interval of one seed is √(a² + b²) of both intervals over test tasks.
    """
    pairs = _pairs(own, other)
    if not pairs:
        return None
    gaps = [a.value - b.value for a, b in pairs]
    if len(gaps) > 1:
        return Difference(fmean(gaps), confidence(gaps), len(gaps))
    return Difference(gaps[0], hypot(*(record.interval or nan for record in pairs[0])), 1)


def _pairs(own: Sequence[Record], other: Sequence[Record]) -> list[tuple[Record, Record]]:
    others = {record.seed: record for record in other}
    return [(record, others[record.seed]) for record in own if record.seed in others]


def mean_cost(records: Sequence[Record], cost: str) -> float:
    """Return the mean over seeds of "multiply_adds" or "bytes"."""
    return fmean(getattr(record, cost) for record in records)


def within(record: Record, budget: float, cost: str) -> Reached | None:
    """Return the value of a run at the time when it has spent a budget.

    Between two evaluations it lies on the straight line, with the interval of the later one. A run
    that spends less is taken at its end, a run whose first evaluation comes later at that.
    """
    spent = record.spent(cost)
    values = [100 * value for value in record.curve[record.headline]]
    intervals = [100 * value for value in record.curve.get("interval", ())]
    after = bisect_right(spent, budget)
    if not values:
        return None
    own = intervals[min(after, len(values) - 1)] if intervals else None
    if after in (0, len(values)):
        at = max(0, after - 1)
        return Reached(values[at], intervals[at] if intervals else None, spent[at])
    share = (budget - spent[after - 1]) / (spent[after] - spent[after - 1])
    return Reached(values[after - 1] + share * (values[after] - values[after - 1]), own, budget)


def mean_within(records: Sequence[Record], budget: float, cost: str) -> tuple[Mean, float] | None:
    """Return the mean of runs within a budget, and the share of it that they have spent."""
    found = [within(record, budget, cost) for record in records]
    points = [point for point in found if point is not None]
    if not points or len(points) < len(found) or any(record.diverged for record in records):
        return None
    values, share = [point.value for point in points], fmean(p.spent for p in points) / budget
    if not all(map(isfinite, values)):
        return None
    if len(points) == 1:
        return Mean(values[0], points[0].interval, over_tasks=True), share
    return Mean(fmean(values), confidence(values)), share


def ahead(own: Sequence[Record], other: Sequence[Record], cost: str) -> Difference | None:
    """Return how far own runs end above others within the cost of each own run."""
    gaps = [
        a.value - there.value
        for a, b in _pairs(own, other)
        if (there := within(b, getattr(a, cost), cost)) is not None
    ]
    if not gaps:
        return None
    return Difference(fmean(gaps), confidence(gaps) if len(gaps) > 1 else nan, len(gaps))
