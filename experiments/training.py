"""Train one run in a folder of its own and reduce it to a record."""

import gc
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from experiments.grid import Run
from experiments.progress import Progress
from experiments.records import Record, check_same
from experiments.runner import StopBetweenRounds
from rabo.errors import ClientError, NonFiniteError, ReplyError
from rabo.runs.experiment import resume, run
from rabo.runs.options import device_name

SPENT = ("multiply_adds", "bytes_up", "bytes_down")
DIGITS = 4  # of metrics in a curve, beside the headline and its interval
NOT_KEPT = ("task", "algorithm", "seed", "clip", "noise_multiplier")  # config has them


def folder_of(each: Run, out: Path) -> Path:
    """Return the folder in which a run trains, with its checkpoints."""
    return out / each.grid / "running" / each.name


def train(each: Run, out: Path) -> Record:
    """Train a run, or go on with it from its last checkpoint, and return its record."""
    folder, begun, why = folder_of(each, out), time.monotonic(), ""
    has_begun = (folder / "config.json").exists()
    if has_begun:
        check_same(each, json.loads((folder / "config.json").read_text()))
    if not _is_finished(folder):
        try:
            progress = [StopBetweenRounds(), Progress(each.name)]
            (resume if has_begun else run)(each.experiment, folder, progress)
        except (ClientError, NonFiniteError) as error:
            # on a GPU the first sign of divergence may be a reply that is refused for its norm
            if not isinstance(getattr(error, "cause", error), (NonFiniteError, ReplyError)):
                raise
            why = str(error)
    config = json.loads((folder / "config.json").read_text())
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # for the next run
    about = {
        "wall_seconds": None if has_begun else round(time.monotonic() - begun, 1),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": ", then ".join(config.get("ran_on", [device_name(each.experiment.device)])),
        "why": why,
    }
    return reduce(each, folder, about)


def reduce(each: Run, folder: Path, about: Mapping[str, Any]) -> Record:
    """Return the record of the run in a folder."""
    summary = json.loads((folder / "summary.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    loss = folder / "loss.json"
    phases = {
        phase: {name: value for name, value in cost.items() if name in SPENT}
        for phase, cost in summary["cost_by_phase"].items()
    }
    return Record(
        {
            "setting": each.setting,
            "method": each.method,
            "seed": each.seed,
            **{name: value for name, value in summary.items() if name not in NOT_KEPT},
            "cost_by_phase": phases,
            **about,
            "curve": curve_of(lines, summary["cost"], summary["headline"]),
            **({"loss": json.loads(loss.read_text())} if loss.exists() else {}),
            "config": config,
        }
    )


def curve_of(
    lines: Sequence[Mapping[str, Any]], total: Mapping[str, int], headline: str
) -> dict[str, list[float]]:
    """Return the rounds with an evaluation as columns, with the costs up to each.

    Measurements before the first round are in the total only, so the costs start there.
    """
    each = {name: [line["cost"][name] for line in lines] for name in SPENT}
    spent = {n: list(accumulate(c, initial=total[n] - sum(c)))[1:] for n, c in each.items()}
    chosen = [i for i, line in enumerate(lines) if headline in line["metrics"]]
    metrics = [lines[i]["metrics"] for i in chosen]
    names = [name for name in (metrics[0] if metrics else ()) if all(name in m for m in metrics)]
    return {
        "round": [lines[i]["round"] + 1 for i in chosen],
        **{name: [_rounded(name, headline, m[name]) for m in metrics] for name in names},
        **{name: [values[i] for i in chosen] for name, values in spent.items()},
        **{
            f"{level}_min": [lines[i]["coverage"][level]["minimum"] for i in chosen]
            for level in ("x", "y")
        },
    }


def _rounded(name: str, headline: str, value: float) -> float:
    return value if name in (headline, "interval") else float(f"{value:.{DIGITS}g}")


def _is_finished(folder: Path) -> bool:
    path = folder / "summary.json"
    return path.exists() and json.loads(path.read_text())["status"] == "finished"


def remove(each: Run, out: Path) -> None:
    """Delete the folder of a run, and the folders above that are empty then."""
    folder = folder_of(each, out)
    shutil.rmtree(folder, ignore_errors=True)
    for parent in folder.parents[:3]:
        if parent.exists() and not any(parent.iterdir()):
            parent.rmdir()
