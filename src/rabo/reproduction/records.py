"""What the runs of a grid have reached, read back from their folders."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot, isfinite, nan
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rabo.reproduction.grid import Changes, Grid, Run
from rabo.reproduction.sweep import differences, is_done
from rabo.runs.comparison import confidence

MOST_NAMED = 3  # folders, in a message


@dataclass(frozen=True)
class Record:
    """One run that has ended: its summary, its evaluations, and what it was asked for."""

    run: Run
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    curve: Sequence[Mapping[str, Any]]

    @property
    def diverged(self) -> bool:
        return self.summary["status"] != "finished" or not isfinite(self.value)

    @property
    def headline(self) -> str:
        return self.summary["headline"]

    @property
    def metrics(self) -> Mapping[str, float]:
        return self.summary["metrics"]

    @property
    def value(self) -> float:
        """The headline: per cent where it is an accuracy, NaN where it was never reached."""
        scale = 100 if "accuracy" in self.headline else 1
        return scale * self.metrics.get(self.headline, nan)

    @property
    def bytes(self) -> int:
        return self.summary["cost"]["bytes_up"] + self.summary["cost"]["bytes_down"]

    @property
    def multiply_adds(self) -> int:
        return self.summary["cost"]["multiply_adds"]


@dataclass(frozen=True)
class Cell:
    """A method in a setting, over the seeds that were run; accuracies are per cent."""

    setting: str
    method: str
    headline: str
    paper: float | None
    value: float | None  # None: some seed diverged
    interval: float | None
    interval_over: str  # "seeds", or with one seed "test tasks" where the task says how sure it is
    full_model: float | None  # where some entries were never trained
    num_seeds: int
    bytes: float
    multiply_adds: float
    seconds: float | None


def read_records(grid: Grid, out: Path, changes: Changes | None = None) -> list[Record]:
    """Return the runs that have ended, over however many seeds there are.

    Runs that are not what the grid asks for, with its changes, are refused.
    """
    seeds = grid.content["seeds"]
    while any(is_done(out / run.folder) for run in _of_seed(grid, seeds)):
        seeds += 1
    found = []
    for run in grid.runs(replace(changes or Changes(), seeds=seeds, only=())):
        folder = out / run.folder
        if is_done(folder):
            texts = {n: (folder / f"{n}.json").read_text() for n in ("config", "summary")}
            config, summary = (json.loads(text) for text in texts.values())
            lines = (folder / "curve.jsonl").read_text().splitlines()
            found.append(Record(run, config, summary, [json.loads(line) for line in lines]))
    check_asked_for(grid, found, out)
    return found


def check_asked_for(grid: Grid, records: Sequence[Record], out: Path) -> None:
    """Refuse what lies in the folder of a run and was run with other options than the grid's."""
    other = {record.run.folder: differences(record.run, record.config) for record in records}
    named = [f"{out / folder} (another {', '.join(own)})" for folder, own in other.items() if own]
    if named:
        first = "; ".join(named[:MOST_NAMED])
        more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        raise ValueError(
            f"{grid.name} asks for other runs than {first}{more}; choose another --out, give the "
            "options that they were run with, or remove these folders to have them run again"
        )


def _of_seed(grid: Grid, seed: int) -> list[Run]:
    return [run for run in grid.runs(Changes(seeds=seed + 1)) if run.experiment.seed == seed]


def grouped(records: Sequence[Record]) -> dict[tuple[str, str], list[Record]]:
    """Return the seeds of every setting and method."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.run.setting, record.run.method), []).append(record)
    return groups


def cells_of(grid: Grid, records: Sequence[Record]) -> list[Cell]:
    """Return the mean over seeds of everything that was run, with its interval."""
    check_expectations(grid, records)
    return [_cell(grid, *key, own) for key, own in grouped(records).items()]


def check_expectations(grid: Grid, records: Sequence[Record]) -> None:
    """Refuse runs whose coverage is not what their setting is about."""
    for record in records:
        expected = grid.settings[record.run.setting].get("expects", {})
        for name, value in expected.items():
            got = record.summary["coverage"][name]
            if got != value:
                raise ValueError(f"{record.run.name} must have {name} = {value}, got {got}")


def _cell(grid: Grid, setting: str, method: str, own: Sequence[Record]) -> Cell:
    mean, interval, over = spread([r.value for r in own if not r.diverged])
    if len(own) == 1 and "interval" in own[0].metrics:
        interval, over = 100 * own[0].metrics["interval"], "test tasks"
    if any(r.diverged for r in own):
        mean, interval, over = None, None, ""
    full = [100 * r.metrics["full_accuracy"] for r in own if "full_accuracy" in r.metrics]
    seconds = [r.summary["wall_seconds"] for r in own if r.summary.get("wall_seconds")]
    label = grid.methods(setting)[method].get("paper", "")
    return Cell(
        setting,
        method,
        own[0].headline,
        grid.content.get("paper", {}).get("numbers", {}).get(setting, {}).get(label),
        mean,
        interval,
        over,
        fmean(full) if full and mean is not None else None,
        len(own),
        fmean(r.bytes for r in own),
        fmean(r.multiply_adds for r in own),
        fmean(seconds) if seconds else None,
    )


class Difference(NamedTuple):
    """How far a method is above another, and the 95 % interval of that."""

    value: float
    interval: float  # NaN of one seed whose task does not say how sure it is
    num_seeds: int  # that both have


def difference(own: Sequence[Record], other: Sequence[Record]) -> Difference | None:
    """Return how far a method is above another over the seeds that both have, if there are any.

    Of several seeds: of the differences seed by seed, by Student's t. Of one: √(a² + b²) of both
    intervals over test tasks, which is rather too wide, as both are judged on the same tasks.
    """
    pairs = pairs_of(own, other)
    if not pairs:
        return None
    gaps = [a.value - b.value for a, b in pairs]
    if len(gaps) > 1:
        return Difference(fmean(gaps), confidence(gaps), len(gaps))
    sure = hypot(*(100 * record.metrics.get("interval", nan) for record in pairs[0]))
    return Difference(gaps[0], sure, 1)


def pairs_of(own: Sequence[Record], other: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Return the runs of two methods that have a seed in common."""
    others = {record.run.experiment.seed: record for record in other}
    return [(r, others[seed]) for r in own if (seed := r.run.experiment.seed) in others]


def spread(values: Sequence[float]) -> tuple[float | None, float | None, str]:
    """Return the mean and, of two values or more, its 95 % interval by Student's t."""
    if not values or not all(map(isfinite, values)):
        return None, None, ""
    if len(values) == 1:
        return values[0], None, ""
    return fmean(values), confidence(values), "seeds"
