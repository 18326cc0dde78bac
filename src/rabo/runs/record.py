"""The folder of a run: what was asked for, every round, and what was reached."""

import csv
import hashlib
import json
import os
import platform
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import torch

from rabo.errors import CheckpointError
from rabo.exchange.cost import Cost
from rabo.federation.rounds import Result, Round
from rabo.runs.checkpoint import write_atomically

fcntl: Any = import_module("fcntl") if find_spec("fcntl") else None  # of POSIX
NAMED = ("task", "algorithm", "seed", "clip", "noise_multiplier")  # of the options, in summaries


class RunFolder:
    """DIR/config.json, DIR/metrics.jsonl, DIR/costs.csv, DIR/coverage.jsonl and DIR/summary.json.

    With `rounds_done`, goes on with the record of a run: lines of later rounds are cut off.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], rounds_done: int | None = None):
        self.path, self.config = path, config
        self.history: list[Round] = []
        self._lengths = {"metrics.jsonl": 0, "costs.csv": 0, "coverage.jsonl": 0}  # what is kept
        if rounds_done is not None:
            self._read(rounds_done)
        elif (path / "metrics.jsonl").exists() and (path / "metrics.jsonl").stat().st_size:
            raise ValueError(f"{path} already holds a run; choose another --out or remove it")
        elif path.is_dir() and not (path / "config.json").exists() and _holds_files(path):
            raise ValueError(f"{path} must be empty or not there yet; choose another --out")

    def __enter__(self) -> "RunFolder":
        self.path.mkdir(parents=True, exist_ok=True)
        self._claim = _claim(self.path)
        write_atomically(self.path / "config.json", _json({**self.config, "versions": versions()}))
        (self.path / "summary.json").unlink(missing_ok=True)  # it is of a run that had stopped
        self._files = self._metrics, self._costs, self._coverage = [*map(self._open, self._lengths)]
        self._rows = csv.writer(self._costs)
        if not self._lengths["costs.csv"]:
            self._rows.writerow(["round", "client", "phase", *Cost._fields])
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()
        if self._claim is not None:
            os.close(self._claim)

    def add(self, done: Round) -> None:
        """Write a round at once, so that nothing is lost if the next one fails."""
        self.history.append(done)
        self._metrics.write(json.dumps(done.as_dict()) + "\n")
        for entry in done.entries:
            self._rows.writerow([entry.round, entry.client, entry.phase, *entry.cost])
        if done.channels:
            counts = {
                level: {group: [round(n, 2) for n in each] for group, each in groups.items()}
                for level, groups in done.channels.items()
            }
            line = json.dumps({"round": done.round, **counts}, separators=(",", ":"))
            self._coverage.write(line + "\n")
        for file in self._files:
            file.flush()

    def secure(self) -> None:
        """Wait until all rounds are on disk."""
        for file in self._files:
            os.fsync(file.fileno())

    def close_with(self, result: Result, headline: str, status: str) -> None:
        summary = {
            **{name: self.config[name] for name in NAMED},
            "status": status,
            "rounds": len(result.history),
            "headline": headline,
            "metrics": result.metrics,
            "cost": result.cost._asdict(),
            "full_model_cost": result.full_cost._asdict(),
            "relative_cost": result.relative_cost,
            "cost_by_phase": {k: v._asdict() for k, v in result.ledger.by_phase.items()},
            "coverage": dict(result.coverage),
            "rounds_skipped": sum(bool(done.skipped) for done in result.history),
            "answers_not_used": sum(len(done.faults) for done in result.history),
            "versions": versions(),
        }
        write_atomically(self.path / "summary.json", _json(summary))

    def _open(self, name: str) -> TextIO:
        """Open a file to go on after what is kept of it."""
        file = (self.path / name).open("a", newline="")
        file.truncate(self._lengths[name])
        return file

    def _read(self, rounds_done: int) -> None:
        """Remember the first rounds; lines of later ones, which may be half written, go."""
        with (self.path / "metrics.jsonl").open("rb") as metrics:
            lines = [metrics.readline() for _ in range(rounds_done)]
        self.history = [self._parse(line, number) for number, line in enumerate(lines)]
        self._lengths["metrics.jsonl"] = sum(map(len, lines))
        for name in ("costs.csv", "coverage.jsonl") if rounds_done else ():
            path = self.path / name
            for row in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
                first = row.removeprefix(b'{"round":').partition(b",")[0]
                is_early = first == b"round" or (first.isdigit() and int(first) < rounds_done)
                if not (is_early and row.endswith(b"\n")):
                    break
                self._lengths[name] += len(row)

    def _parse(self, line: bytes, number: int) -> Round:
        try:
            done = Round.from_dict(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{self.path / 'metrics.jsonl'} must have a line for every round before the "
                f"checkpoint, got none that can be read for round {number + 1}"
            ) from error
        if done.round != number:
            raise CheckpointError(
                f"line {number + 1} of {self.path / 'metrics.jsonl'} must be round {number + 1}, "
                f"got {done.round + 1}"
            )
        return done


def versions() -> dict[str, str]:
    """Say what computes: two with the same `code` run the same lines of this package."""
    from rabo import __version__

    return {
        "rabo": __version__,
        "code": _own_code(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def code_of(package: Path) -> str:
    """Return a fingerprint of all files of Python of a package."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


@cache
def _own_code() -> str:
    return code_of(Path(__file__).parents[1])


def _holds_files(path: Path) -> bool:
    """Say whether something is there beside what a killed process had not yet put in place."""
    return any(each.suffix != ".partial" for each in path.iterdir())


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _claim(path: Path) -> int | None:
    """Take a folder for this process, until it ends or closes what is returned."""
    if fcntl is None:
        return None
    folder = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        raise ValueError(
            f"another process is at the run in {path}; wait for it, or end it, or choose another "
            "folder"
        ) from None
    except OSError:  # a file system without locks
        os.close(folder)
        return None
    return folder
