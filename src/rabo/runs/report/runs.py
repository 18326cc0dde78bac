"""Read the folders of runs; a file may be missing, old or half written.

The content stays plain JSON. `number` and `text` return a member only if it has the right type.
"""

import csv
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

FILES = {
    "config.json": "what was asked for",
    "metrics.jsonl": "the rounds",
    "summary.json": "what was reached; the run was not ended",
    "costs.csv": "costs by client and phase",
    "coverage.jsonl": "which channels were trained",
}
STAMP = re.compile(r"-\d{8}-\d{6}$")  # when a run began, in the folder that it chose itself
LONGEST_NAME = 24
RUN_FILES = ("config.json", "metrics.jsonl", "summary.json")


class Spent(NamedTuple):
    """What one client spent in one phase of all rounds."""

    multiply_adds: float
    bytes: float


@dataclass
class Run:
    """All that is known of a run; what is not is named in `missing`."""

    name: str
    group: str  # runs of one group have one colour: seeds of an algorithm
    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    rounds: Sequence[Mapping[str, Any]] = ()
    coverage: Sequence[Mapping[str, Any]] = ()
    costs: Mapping[tuple[int, str], Spent] = field(default_factory=dict)
    loss: Mapping[str, Any] = field(default_factory=dict)
    picture: bytes = b""
    missing: Sequence[str] = ()

    @property
    def headline(self) -> str:
        """The metric a reader looks at first; of old runs that were not ended, the first there."""
        told = self.summary.get("headline") or self.config.get("headline")
        names = [name for done in self.rounds for name in mapping(done, "metrics")]
        likely = [name for name in names if "accuracy" in name] or names
        return told if isinstance(told, str) else likely[0] if likely else ""

    @property
    def status(self) -> str:
        done = self.rounds[-1]["round"] + 1 if self.rounds else 0
        asked = number(self.config, "rounds")
        of = f" of {asked:.0f}" if asked and asked != done else ""
        return f"{text(self.summary, 'status') or 'not ended'}, {done}{of} rounds"

    def curve(self, name: str) -> list[tuple[Mapping[str, Any], float]]:
        """Return the rounds that have a metric, with its value."""
        found = [(done, number(mapping(done, "metrics"), name)) for done in self.rounds]
        return [(done, value) for done, value in found if value is not None]

    def vectors(self, name: str) -> list[tuple[int, list[float | None]]]:
        """Return the rounds that have a list of numbers, with it; of old runs, the last of all."""
        found = [
            (done["round"] + 1, numbers(mapping(done, "vectors"), name)) for done in self.rounds
        ]
        told = [(round, values) for round, values in found if values]
        last = numbers(self.loss, name)
        return told or ([(len(self.rounds), last)] if last else [])


def find_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the runs in folders: of runs, of comparisons, or of several of them."""
    folders = {f.resolve(): f for path in paths for f in _folders(path)}  # each once, as given
    runs = []
    for folder, parts in zip(folders.values(), _short_names([*folders]), strict=True):
        group = parts[:-1] if parts[-1].startswith("seed-") else parts
        runs.append(read_run(folder, "/".join(parts), "/".join(group)))
    return runs


def _short_names(folders: Sequence[Path]) -> list[tuple[str, ...]]:
    """Return the last parts of every path, as many as tell all apart; a seed alone says little.

    Without the time of a run, and the middle of what is long, where all differ without them.
    """
    number_of = 1 + any(folder.name.startswith("seed-") for folder in folders)
    while len({folder.parts[-number_of:] for folder in folders}) < len(folders):
        number_of += 1
    names = [folder.parts[-number_of:] for folder in folders]
    for shorten in (_without_time, _without_middle):
        shorter = [tuple(map(shorten, parts)) for parts in names]
        names = shorter if len(set(shorter)) == len(names) else names
    return names


def _without_time(part: str) -> str:
    return STAMP.sub("", part)


def _without_middle(part: str) -> str:
    half = LONGEST_NAME // 2
    return part if len(part) <= LONGEST_NAME else f"{part[:half]}…{part[-half + 1 :]}"


def _folders(path: Path) -> list[Path]:
    if not path.exists():
        raise ValueError(f"there is no folder {path}; give the one that the run named at its end")
    if _is_run(path):
        return [path]
    below = [f.parent for depth in ("*", "*/*", "*/*/*") for f in path.glob(f"{depth}/config.json")]
    below += [f.parent for depth in ("*", "*/*") for f in path.glob(f"{depth}/metrics.jsonl")]
    found = sorted({folder for folder in below if _is_run(folder)})
    if not found:
        raise ValueError(
            f"{path} holds no run; give folders that rabo run, rabo compare or rabo demo wrote"
        )
    return found


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in RUN_FILES)


def find_targets(paths: Sequence[Path]) -> dict[str, list[float]]:
    """Return the targets of the comparisons in folders, by headline metric."""
    found: dict[str, list[float]] = {}
    for file in (
        f for path in paths for f in (path / "results.json", *path.glob("*/results.json"))
    ):
        content = _object(file, [])
        target = number(content, "target")
        if target is not None and target not in found.setdefault(text(content, "headline"), []):
            found[text(content, "headline")].append(target)
    return found


def read_run(folder: Path, name: str, group: str) -> Run:
    """Read one folder; nothing in it is trusted to be there or to be whole."""
    run = Run(name, group, folder)
    missing = [f"{f} ({what})" for f, what in FILES.items() if not (folder / f).is_file()]
    run.config, run.summary = (
        _object(folder / f, missing) for f in ("config.json", "summary.json")
    )
    run.loss = _object(folder / "loss.json", missing)
    run.rounds = _lines(folder / "metrics.jsonl", missing) or [
        {**point, "round": point["round"] - 1, "total": point.get("spent")}
        for point in _lines(folder / "curve.jsonl", missing)  # what is kept of a run of a grid
    ]
    run.coverage = _lines(folder / "coverage.jsonl", missing)
    run.costs = _costs(folder / "costs.csv", missing)
    picture = folder / "tasks.png"
    run.picture = picture.read_bytes() if picture.is_file() else b""
    if not run.picture and run.config.get("task") == "few-shot":
        missing.append("tasks.png (test tasks; drawn when a run has ended)")
    run.missing = missing
    return run


def number(of: Mapping[str, Any], name: str) -> float | None:
    """Return a finite number, or None if there is none of that name."""
    value = of.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
        return None
    return value


def numbers(of: Mapping[str, Any], name: str) -> list[float | None]:
    """Return a list of finite numbers, None for what is no number; empty if there is none."""
    values = of.get(name)
    each = values if isinstance(values, list) else []
    return [number({name: value}, name) for value in each]


def text(of: Mapping[str, Any], name: str) -> str:
    value = of.get(name)
    return value if isinstance(value, str) else ""


def mapping(of: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = of.get(name)
    return value if isinstance(value, dict) else {}


def _object(path: Path, missing: list[str]) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        missing.append(f"{path.name} (cannot be read: {error})")
        return {}
    return content if isinstance(content, dict) else {}


def _lines(path: Path, missing: list[str]) -> list[Mapping[str, Any]]:
    """Return the lines that are whole, in the order of their rounds."""
    found: dict[int, Mapping[str, Any]] = {}
    lost = 0
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        try:
            content = json.loads(line)
            found[int(content["round"])] = {**content, "round": int(content["round"])}
        except (ValueError, KeyError, TypeError):
            lost += 1
    if lost:
        missing.append(f"{path.name} ({lost} of its lines cannot be read)")
    return [found[round] for round in sorted(found)]


def _costs(path: Path, missing: list[str]) -> Mapping[tuple[int, str], Spent]:
    """Add up the rows of each client and phase."""
    found: dict[tuple[int, str], Spent] = {}
    lost = 0
    if path.is_file():
        with path.open(newline="", errors="replace") as file:
            for row in csv.DictReader(file):
                try:
                    key = int(row["client"]), row["phase"]
                    work = float(row["multiply_adds"])
                    traffic = float(row["bytes_up"]) + float(row["bytes_down"])
                    if not isfinite(work + traffic):
                        raise ValueError("not a number")
                except (KeyError, TypeError, ValueError):
                    lost += 1
                    continue
                known = found.get(key, Spent(0, 0))
                found[key] = Spent(known.multiply_adds + work, known.bytes + traffic)
    if lost:
        missing.append(f"{path.name} ({lost} of its rows cannot be read)")
    return found
