"""The runs of an experiment on record: one JSON object a line in `runs.jsonl`."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from typing import Any

from experiments.grid import Run
from rabo.runs.checkpoint import write_atomically
from rabo.runs.experiment import Experiment

FILE = "runs.jsonl"
FREE = ("device", "runtime", "checkpoint_every")  # options that do not make another run
PLACES = ("data_root", "download")  # nor do these options of a task


@dataclass(frozen=True)
class Record:
    """One finished or diverged run."""

    content: Mapping[str, Any]

    @property
    def setting(self) -> str:
        return self.content["setting"]

    @property
    def method(self) -> str:
        return self.content["method"]

    @property
    def seed(self) -> int:
        return self.content["seed"]

    @property
    def name(self) -> str:
        return f"{self.setting}/{self.method}/seed-{self.seed}"

    @property
    def headline(self) -> str:
        return self.content["headline"]

    @property
    def metrics(self) -> Mapping[str, float]:
        return self.content["metrics"]

    @property
    def value(self) -> float:
        """The headline: per cent if it is an accuracy, NaN if it was never evaluated."""
        scale = 100 if "accuracy" in self.headline else 1
        return scale * self.metrics.get(self.headline, nan)

    @property
    def interval(self) -> float | None:
        """The 95 % interval over test tasks in per cent, if the task reports one."""
        found = self.metrics.get("interval")
        return None if found is None else 100 * found

    @property
    def diverged(self) -> bool:
        return self.content["status"] != "finished" or not isfinite(self.value)

    @property
    def multiply_adds(self) -> int:
        return self.content["cost"]["multiply_adds"]

    @property
    def bytes(self) -> int:
        """The bytes in both directions."""
        cost = self.content["cost"]
        return cost["bytes"] if "bytes" in cost else cost["bytes_up"] + cost["bytes_down"]

    @property
    def curve(self) -> Mapping[str, Sequence[float]]:
        """The evaluations: columns with one entry for each."""
        return self.content["curve"]

    def spent(self, cost: str) -> Sequence[float]:
        """Return a cost, "bytes" or a column of the curve, at each evaluation."""
        if cost in self.curve:
            return self.curve[cost]
        both = zip(self.curve["bytes_up"], self.curve["bytes_down"], strict=True)
        return [up + down for up, down in both]


def read_records(path: Path) -> list[Record]:
    """Read a runs.jsonl; a missing file has no runs."""
    if not path.exists():
        return []
    return [Record(json.loads(line)) for line in path.read_text().splitlines()]


def add_record(path: Path, record: Record) -> None:
    """Add a run; whatever happens, the file holds whole lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_bytes() if path.exists() else b""
    line = json.dumps(record.content, separators=(",", ":"), ensure_ascii=False)
    write_atomically(path, before + line.encode() + b"\n")


def grouped(records: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    """Group the seeds of each setting and method, in ascending order."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in sorted(records, key=lambda record: record.seed):
        groups.setdefault((record.setting, record.method), []).append(record)
    return groups


def split_done(runs: Sequence[Run], records: Sequence[Record]) -> tuple[list[Run], list[Record]]:
    """Return the runs that are missing, and the records of the others.

    Raise ValueError if a run on record was done with other options.
    """
    known = {record.name: record for record in records}
    missing, done = [], []
    for run in runs:
        if run.name not in known:
            missing.append(run)
            continue
        check_same(run, known[run.name].content["config"])
        done.append(known[run.name])
    return missing, done


def check_same(run: Run, config: Mapping[str, Any]) -> None:
    """Raise ValueError if a run with this name was done with other options."""
    other = differences(run.experiment, config)
    if other:
        raise ValueError(
            f"{run.grid}/{run.name} was run before with another {', '.join(other)}; "
            "give the same options, or another --out"
        )


def differences(experiment: Experiment, config: Mapping[str, Any]) -> list[str]:
    """Return the options in which a recorded run differs from an experiment.

    Device, runtime and places of data do not count. An unrecorded option had its default.
    """
    recorded = {**Experiment(task=experiment.task).config(), **config}
    wanted = experiment.config()
    return [
        name
        for name in wanted
        if name not in FREE and _choice(wanted[name]) != _choice(recorded[name])
    ]


def _choice(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {name: each for name, each in value.items() if name not in PLACES}
