"""Several algorithms on the same data and seeds: what each reaches, and at what price."""

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from rabo.algorithms import canonical, find_algorithm
from rabo.errors import lookup, needs
from rabo.runs.experiment import Experiment, resume, run
from rabo.runs.options import parse_option
from rabo.runs.plots import band_of, draw_band, label, new_figure, save, styles_of
from rabo.runs.writers import Writer
from rabo.tasks import Setup


class Point(NamedTuple):
    """A value of the headline metric and what it took to get there."""

    value: float
    rounds: int
    bytes: int
    multiply_adds: int


class Price(NamedTuple):
    """What it takes to reach a target: means over the seeds that do."""

    rounds: float
    bytes: float
    multiply_adds: float
    num_reached: int


class Row(NamedTuple):
    """One algorithm, over all seeds."""

    algorithm: str
    value: float
    interval: float | None
    bytes: float
    multiply_adds: float
    relative_bytes: float
    relative_multiply_adds: float
    to_target: Price | None  # None: no seed reaches it


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All choices of a comparison, as they are written to comparison.json."""

    experiment: Experiment  # of every run, but for its algorithm and its seed
    algorithms: Sequence[str]
    seeds: int = 3

    def __post_init__(self) -> None:
        for entry in self.algorithms:
            find_algorithm(split_entry(entry)[0])
        if len(set(self.algorithms)) < max(1, len(self.algorithms)):
            raise ValueError(f"algorithms must differ, got {', '.join(self.algorithms) or 'none'}")
        if self.seeds < 1:
            raise ValueError(f"seeds must be at least 1, got {self.seeds}")
        for option in self.experiment.algorithm_options:
            names = [split_entry(entry)[0] for entry in self.algorithms]
            if not any(option in _options(name) for name in names):
                raise ValueError(f"none of {', '.join(self.algorithms)} has an option {option!r}")

    def runs(self) -> Iterator[tuple[str, Experiment]]:
        """Yield every run, a seed of all algorithms before the next seed.

        An option goes to the algorithms that have it, but for one given to an algorithm alone.
        """
        given = self.experiment.algorithm_options
        for k in range(self.seeds):
            for entry in self.algorithms:
                name, own = split_entry(entry)
                options = {n: v for n, v in given.items() if n in _options(name)} | own
                seed = self.experiment.seed + k
                run = replace(self.experiment, algorithm=name, algorithm_options=options, seed=seed)
                yield entry, run

    def as_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))


def compare(
    comparison: Comparison,
    out: Path,
    *,
    baseline: str | None = None,
    target: float | None = None,
    on_start: Callable[[str, int, str, bool], None] = lambda *_: None,
    writers: Sequence[Writer] = (),
) -> "Outcome":
    """Run what is missing below out/ALGORITHM/seed-K, then weigh all of it.

    `on_start` hears of every run (algorithm and seed), what its headline is and whether it is
    finished already; `writers` hear of its rounds.
    """
    with needs("compare", "comparisons"):  # a missing package is reported before the runs
        import matplotlib  # noqa: F401
        import scipy  # noqa: F401
    baseline = baseline or comparison.algorithms[0]
    lookup("baseline", baseline, dict.fromkeys(comparison.algorithms, 0))
    setup = _refuse_what_cannot_run(comparison)
    _open_folder(comparison, out)
    for entry, experiment in comparison.runs():
        where = folder_of(entry, experiment, out)
        finished = is_finished(where)
        on_start(entry, experiment.seed, setup.headline, finished)
        if not finished:
            begun = (where / "config.json").exists()
            (resume if begun else run)(experiment, where, writers)
    outcome = weigh(comparison, out, setup, baseline, target)
    outcome.write(out)
    return outcome


def folder_of(entry: str, experiment: Experiment, out: Path) -> Path:
    return out / re.sub(r"[^\w.=-]+", "-", entry) / f"seed-{experiment.seed}"


def split_entries(text: str) -> tuple[str, ...]:
    """Split "rabo,simfbo:num_local_steps=[1,2]" at the commas between algorithms."""
    return tuple(entry.strip() for entry in re.split(r",(?![^\[]*\])", text))


def split_entry(entry: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of "fedmbo:policy=importance:num_terms=5"."""
    name, *options = entry.split(":")
    return name, dict(map(parse_option, options))


def is_finished(folder: Path) -> bool:
    summary = folder / "summary.json"
    return summary.exists() and json.loads(summary.read_text())["status"] == "finished"


def _options(name: str) -> set[str]:
    return {option.name for option in fields(find_algorithm(name))}


def _refuse_what_cannot_run(comparison: Comparison) -> Setup:
    """Build every algorithm once: what makes no sense on the task is said before anything runs."""
    first: Setup | None = None
    for _, experiment in replace(comparison, seeds=1).runs():
        setup = experiment.federation()[1]
        first = first or setup
    assert first is not None  # there is at least one algorithm
    return first


def _open_folder(comparison: Comparison, out: Path) -> None:
    path, choices = out / "comparison.json", comparison.as_dict()
    if path.exists():
        known = json.loads(path.read_text())
        other = {**known.pop("experiment"), **known}
        own = {**choices.pop("experiment"), **choices}
        different = sorted(
            name
            for name in own
            if own[name] != other.get(name) and name not in ("algorithms", "seeds")
        )
        if different:
            raise ValueError(
                f"{out} holds a comparison with other options ({', '.join(different)}); choose "
                "another --out, or give the options that are there to go on with it"
            )
    elif out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} must be empty or hold a comparison; choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(comparison.as_dict(), indent=2) + "\n")


def read_curve(folder: Path, headline: str) -> list[Point]:
    """Return the evaluations of a run, each with all that was spent before it."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    total = json.loads((folder / "summary.json").read_text())["cost"]

    def spent(*names: str) -> list[int]:
        each = [sum(line["cost"][name] for name in names) for line in lines]
        before = sum(total[name] for name in names) - sum(each)  # measurements before round 0
        return list(accumulate(each, initial=before))[1:]

    traffic, work = spent("bytes_up", "bytes_down"), spent("multiply_adds")
    return [
        Point(line["metrics"][headline], line["round"] + 1, traffic[i], work[i])
        for i, line in enumerate(lines)
        if headline in line["metrics"]
    ]


def common_target(curves: Sequence[Sequence[Point]], falls: bool = False) -> float:
    """Return the best value that every run reaches."""
    best = [(min if falls else max)(point.value for point in curve) for curve in curves]
    return max(best) if falls else min(best)


def price_of(curves: Sequence[Sequence[Point]], target: float, falls: bool = False) -> Price | None:
    """Return the mean cost at the first evaluation that reaches a target, if any run does."""
    sign = -1 if falls else 1
    firsts = [next((p for p in c if sign * p.value >= sign * target), None) for c in curves]
    reached = [point for point in firsts if point is not None]
    if not reached:
        return None
    return Price(
        fmean(point.rounds for point in reached),
        fmean(point.bytes for point in reached),
        fmean(point.multiply_adds for point in reached),
        len(reached),
    )


def confidence(values: Sequence[float]) -> float:
    """Return the half width of the 95 % interval of a mean, by Student's t."""
    with needs("compare", "confidence intervals"):
        from scipy import stats
    quantile = float(stats.t.ppf(0.975, len(values) - 1))
    return quantile * stdev(values) / sqrt(len(values))


def weigh(
    comparison: Comparison, out: Path, setup: Setup, baseline: str, target: float | None
) -> "Outcome":
    """Read the folders of all runs and put the algorithms beside each other."""
    folders = {name: [] for name in comparison.algorithms}
    for entry, experiment in comparison.runs():
        folders[entry].append(folder_of(entry, experiment, out))
    curves = {n: [read_curve(f, setup.headline) for f in own] for n, own in folders.items()}
    if target is None:
        target = common_target([c for own in curves.values() for c in own], setup.falls)
    costs = {name: _mean_costs(own) for name, own in folders.items()}
    rows = []
    for name, own in folders.items():
        last = [json.loads((f / "summary.json").read_text())["metrics"] for f in own]
        values = [metrics[setup.headline] for metrics in last]
        interval = confidence(values) if len(own) > 1 else last[0].get("interval")
        (traffic, work), (base_traffic, base_work) = costs[name], costs[baseline]
        shares = traffic / max(1, base_traffic), work / max(1, base_work)
        price = price_of(curves[name], target, setup.falls)
        rows.append(Row(name, fmean(values), interval, traffic, work, *shares, price))
    return Outcome(comparison, setup.headline, baseline, target, rows, curves)


def _mean_costs(folders: Sequence[Path]) -> tuple[float, float]:
    """Return the mean bytes in both directions and the mean multiply-adds."""
    each = [json.loads((f / "summary.json").read_text())["cost"] for f in folders]
    traffic = fmean(cost["bytes_up"] + cost["bytes_down"] for cost in each)
    return traffic, fmean(cost["multiply_adds"] for cost in each)


@dataclass(frozen=True)
class Outcome:
    """A table of algorithms, and their curves for every seed."""

    comparison: Comparison
    headline: str
    baseline: str
    target: float
    rows: Sequence[Row]
    curves: Mapping[str, Sequence[Sequence[Point]]]

    def write(self, out: Path) -> None:
        """Write results.json, results.csv and results.png."""
        (out / "results.json").write_text(json.dumps(self.as_dict(), indent=1) + "\n")
        with (out / "results.csv").open("w", newline="") as file:
            table = csv.writer(file)
            priced = [f"to_target_{name}" for name in Price._fields]
            table.writerow([*Row._fields[:-1], *priced])
            for row in self.rows:
                table.writerow([*row[:-1], *(row.to_target or [None, None, None, 0])])
        self.draw(out / "results.png")

    def as_dict(self) -> dict[str, Any]:
        def entry(row: Row) -> dict[str, Any]:
            return {**row._asdict(), "to_target": row.to_target and row.to_target._asdict()}

        return {
            "task": self.comparison.experiment.task,
            "headline": self.headline,
            "seeds": self.comparison.seeds,
            "baseline": self.baseline,
            "target": self.target,
            "algorithms": {row.algorithm: entry(row) for row in self.rows},
            "curves": {
                n: [[p._asdict() for p in c] for c in own] for n, own in self.curves.items()
            },
        }

    def draw(self, path: Path) -> None:
        """Draw the headline against rounds, bytes and multiply-adds: mean and band over seeds."""
        figure, panels = new_figure(3)
        styles = styles_of({entry: canonical(split_entry(entry)[0]) for entry in self.curves})
        scales = {"rounds": 1.0, "bytes": 1e-6, "multiply_adds": 1e-9}
        names = ("rounds", "megabytes", "multiply-adds (billions)")
        for panel, (axis, scale), title in zip(panels, scales.items(), names, strict=True):
            for name, own in self.curves.items():
                points = [{p.rounds: (scale * getattr(p, axis), p.value) for p in c} for c in own]
                draw_band(panel, band_of(points), styles[name], name)
            target = f"target {self.target:.4g}"
            panel.axhline(self.target, color="black", linewidth=1, linestyle=":", label=target)
            label(panel, f"against {title}", title, self.headline, "linear-linear")
        if self.comparison.seeds > 1:
            figure.suptitle(f"mean of {self.comparison.seeds} seeds; band: lowest to highest")
        save(figure, path)
