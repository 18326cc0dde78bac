"""Do the runs of a grid that are missing, put them on record and print their table."""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from experiments.estimators import measure_estimators
from experiments.grid import Changes, Grid, Run
from experiments.grids import GRIDS
from experiments.records import FILE, Record, add_record, read_records, split_done
from experiments.runner import perform_all
from experiments.tables import table_of
from experiments.theory.literal import register
from experiments.training import remove, train
from rabo.runs.options import choose_device, parse_option
from rabo.tasks.data.cifar10 import load_cifar10
from rabo.tasks.data.omniglot import load_omniglot

DATA = "RABO_DATA"
DOWNLOADS: dict[str, Callable[..., Any]] = {"omniglot": load_omniglot, "cifar10": load_cifar10}
MISTAKES = (ValueError, ImportError, FileNotFoundError)  # of the request: all runs would fail
WORK: dict[str, Callable[..., Record]] = {"study-estimators": measure_estimators}


def reproduce(
    grid: Grid,
    out: Path,
    changes: Changes,
    *,
    jobs: int = 1,
    keep: bool = False,
    say: Callable[[str], None] = print,
) -> list[Record]:
    """Do the missing runs of a grid and return the records of all that were asked for.

    Runs on record in out/GRID/runs.jsonl are not repeated; a run that was interrupted goes on from
    its checkpoint. If a run fails, the others continue; then RuntimeError names the failed ones.
    """
    register()
    runs, path = grid.runs(changes), out / grid.name / FILE
    missing, _ = split_done(runs, read_records(path))
    say(f"{grid.name}: {len(missing)} of {len(runs)} runs to do, in {path.parent}")
    number, failed = len(runs) - len(missing), []
    work = partial(WORK.get(grid.name, train), out=out)
    with closing(perform_all(work, longest_first(missing), jobs)) as ended:
        for run, found in ended:
            if isinstance(found, MISTAKES):
                raise found
            if isinstance(found, Exception):
                failed.append(run.name)
                print(f"{run.name} failed:", file=sys.stderr)
                traceback.print_exception(found)
                continue
            add_record(path, found)
            if not keep:
                remove(run, out)
            number += 1
            say(f"[{number}/{len(runs)}] {run.name}: {outcome(found)}")
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}")
    return split_done(runs, read_records(path))[1]


def longest_first(runs: Sequence[Run]) -> list[Run]:
    """Order runs by seed; within a seed the last settings, which cost most, come first."""
    place = {run.name: i for i, run in enumerate(runs)}
    return sorted(runs, key=lambda run: (run.seed, -place[run.name]))


def outcome(record: Record) -> str:
    """Format the result of a run in one line."""
    if record.diverged:
        return f"diverged after {record.content['rounds']} rounds: {record.content['why']}"
    interval = record.metrics.get("interval")
    sure = f" ± {interval:.4f}" if interval else ""
    headline = record.headline.replace("_", " ")
    return f"{headline} {record.metrics[record.headline]:.4f}{sure}"


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return the options of a grid's command."""
    parser = argparse.ArgumentParser(
        prog=f"python -m experiments {name}", description=GRIDS[name].title
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/experiments"), help="folder of runs (%(default)s)")
    add("--only", action="append", default=[], help="pattern of SETTING/METHOD/seed-N; repeatable")
    add("--rounds", type=int, help="another number of rounds")
    add("--seeds", type=int, help="another number of seeds")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--jobs", type=int, default=1, help="runs at a time, each in its own process (%(default)s)")
    add("--option", action="append", default=[], help="an option of the task, NAME=VALUE")
    add("--data-root", help="folder of the data (else RABO_DATA, else the user cache)")
    add("--download", action="store_true", help="download missing data")
    add("--keep", action="store_true", help="keep the folders of runs, with their models")
    return parser


def main(name: str, words: Sequence[str]) -> int:
    """Run the command of a grid."""
    args, grid = parser_of(name).parse_args(words), GRIDS[name]
    if args.jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {args.jobs}")
    if args.data_root and not (args.download or Path(args.data_root).is_dir()):
        raise ValueError(f"data-root must be a folder, got {args.data_root}; --download makes it")
    choose_device(args.device)
    if args.data_root:
        os.environ[DATA] = args.data_root  # no option of a run, so no part of its record
    changes = Changes(
        rounds=args.rounds,
        seeds=args.seeds,
        device=args.device,
        task_options=dict(map(parse_option, args.option)),
        only=tuple(args.only),
    )
    if args.download:
        download(grid.runs(changes))
    print(table_of(grid, reproduce(grid, args.out, changes, jobs=args.jobs, keep=args.keep)))
    return 0


def download(runs: Sequence[Run]) -> None:
    """Download the data sets of runs."""
    for name in dict.fromkeys(run.experiment.task_options.get("dataset") for run in runs):
        if name in DOWNLOADS:
            DOWNLOADS[name](download=True)
