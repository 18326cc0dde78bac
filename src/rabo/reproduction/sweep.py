"""Run what is missing of a grid, and keep what is small."""

import gc
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from rabo.errors import ClientError, NonFiniteError, ReplyError
from rabo.reproduction.grid import Run
from rabo.reproduction.lanes import Failure, Heed, Note, Tell, side_by_side
from rabo.reproduction.notes import EVERY, Notes
from rabo.runs.checkpoint import write_atomically
from rabo.runs.experiment import Experiment, resume, run
from rabo.runs.options import device_name

KEPT = ("config.json", "curve.jsonl", "summary.json", "loss.json")
FREE = ("device", "runtime", "checkpoint_every")  # do not make another run of it
PLACES = ("data_root", "download")  # nor do these options of a task
SPENT = ("multiply_adds", "bytes_up", "bytes_down")


def sweep(
    runs: Sequence[Run],
    out: Path,
    *,
    limit: float | None = None,
    jobs: int = 1,
    say: Callable[[str], None] = print,
    every: float = EVERY,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Do the runs that are missing below `out`; return how many the time limit left.

    A run that was cut goes on from its checkpoint. One that diverged is on record as such and is
    not done again. `jobs` runs are under way at a time, each says every so many seconds how far it
    is; where one of several at a time fails, others go on.
    """
    begun, missing = clock(), missing_of(runs, out)
    do = partial(_do, out=out, every=every, clock=clock, jobs=max(1, min(jobs, len(missing))))
    number, failed = len(runs) - len(missing), []

    def note(each: Run, text: str) -> None:
        say(f"  {each.name}: {text}")

    def may_begin() -> bool:
        return limit is None or clock() - begun <= limit

    if jobs == 1:
        done = ((each, do(each, partial(note, each))) for each in missing if may_begin())
    else:
        done = side_by_side(do, dearest_first(missing), jobs, may_begin)
    with closing(done):
        for each, reached in done:
            trace = (out / each.folder).with_name(f"seed-{each.experiment.seed}.error.txt")
            if isinstance(reached, Note):
                note(each, reached.text)
            elif isinstance(reached, Failure):
                failed.append(reached)
                if reached.mistake is None:
                    say(f"{each.name} failed: {reached.why}{_keep_trace(trace, reached)}")
            else:
                number += 1
                trace.unlink(missing_ok=True)
                say(f"[{number}/{len(runs)}] {each.name}: {reached}")
    for failure in failed:
        if failure.mistake is not None:
            raise failure.mistake(failure.why)
    if failed:
        raise ValueError(
            f"of {len(runs)} runs {number} are there and {len(failed)} failed, the first by: "
            f"{failed[0].why}; give the same command again to go on"
        )
    return len(runs) - number


def _keep_trace(path: Path, failure: Failure) -> str:
    """Write where a run failed beside its folder, and say so."""
    if not failure.traceback:
        return ""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(failure.traceback)
    return f" (more in {path})"


def missing_of(runs: Sequence[Run], out: Path) -> list[Run]:
    """Return the runs that are not there yet; refuse others in their places."""
    missing = []
    for each in runs:
        if is_done(out / each.folder):
            check_same(each, out / each.folder)
        else:
            missing.append(each)
    return missing


def dearest_first(runs: Sequence[Run]) -> list[Run]:
    """Return a seed's last settings first, which cost most, so that none is waited for alone."""
    last_first = list(reversed(runs))
    return sorted(last_first, key=lambda each: each.experiment.seed)


def is_done(folder: Path) -> bool:
    """Say whether a run has ended and was reduced to what is kept."""
    return (folder / "curve.jsonl").exists() and not (folder / "metrics.jsonl").exists()


def check_same(run: Run, folder: Path) -> None:
    """Refuse a folder whose run was asked for with other options."""
    other = differences(run, json.loads((folder / "config.json").read_text()))
    if other:
        raise ValueError(
            f"{folder} holds a run with another {', '.join(other)}; choose another --out, give the "
            "options that are there, or remove that folder"
        )


def differences(run: Run, config: Mapping[str, Any]) -> list[str]:
    """Return the options in which a recorded run is not the one that is asked for.

    All are compared but for those that say where and how it ran and where its data lie; one that
    was not on record yet had its default.
    """
    recorded = {**Experiment(task=run.experiment.task).config(), **config}
    wanted = run.experiment.config()
    return [n for n in wanted if n not in FREE and _choice(wanted[n]) != _choice(recorded[n])]


def _choice(value: Any) -> Any:
    """Return an option without the places that options of a task name."""
    if not isinstance(value, Mapping):
        return value
    return {name: each for name, each in value.items() if name not in PLACES}


def _do(
    each: Run, tell: Tell, out: Path, every: float, clock: Callable[[], float], jobs: int
) -> str:
    """Do one run and return what it has reached."""
    folder, begun, why = out / each.folder, clock(), ""
    has_begun = (folder / "config.json").exists()
    if has_begun:
        check_same(each, folder)
    if not _is_ended(folder):
        try:
            (resume if has_begun else run)(
                each.experiment, folder, [Heed(), Notes(tell, every, clock)]
            )
        except (ClientError, NonFiniteError) as error:
            # what was sent is refused for its norm where a GPU's numbers are not looked at before
            if not isinstance(getattr(error, "cause", error), (NonFiniteError, ReplyError)):
                raise
            why = str(error)
    config = json.loads((folder / "config.json").read_text())
    about = {
        "wall_seconds": None if has_begun else round(clock() - begun, 1),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "most_runs_at_a_time": jobs,
        "device": ", then ".join(config.get("ran_on", [device_name(each.experiment.device)])),
        "why": why,
    }
    _reduce(folder, about)
    gc.collect()  # a GPU's memory is needed by the next run
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    summary = json.loads((folder / "summary.json").read_text())
    if why:
        return f"diverged after {summary['rounds']} rounds: {why}"
    headline = summary["headline"]
    interval = summary["metrics"].get("interval")
    value = f"{headline.replace('_', ' ')} {summary['metrics'][headline]:.4f}"
    return f"{value}{f' ± {interval:.4f}' if interval else ''}, {clock() - begun:.0f} s"


def _is_ended(folder: Path) -> bool:
    path = folder / "summary.json"
    return path.exists() and json.loads(path.read_text())["status"] == "finished"


def _reduce(folder: Path, about: dict[str, Any]) -> None:
    """Keep the evaluations, with all that was spent before each, and the summary."""
    summary = {**json.loads((folder / "summary.json").read_text()), **about}
    write_atomically(folder / "summary.json", (json.dumps(summary, indent=1) + "\n").encode())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    costs = {name: [line["cost"][name] for line in lines] for name in SPENT}
    total = {n: list(accumulate(c, initial=summary["cost"][n] - sum(c))) for n, c in costs.items()}
    points = [
        {
            "round": line["round"] + 1,
            "metrics": line["metrics"],
            "spent": {name: total[name][i + 1] for name in SPENT},
            "coverage": {level: line["coverage"][level]["minimum"] for level in ("x", "y")},
        }
        for i, line in enumerate(lines)
        if summary["headline"] in line["metrics"]
    ]
    text = "".join(json.dumps(point) + "\n" for point in points)
    write_atomically(folder / "curve.jsonl", text.encode())
    for path in sorted(folder.iterdir(), key=lambda p: p.name == "metrics.jsonl"):  # it goes last
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in KEPT:
            path.unlink()
