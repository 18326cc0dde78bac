"""`rabo run`: run an algorithm on a task."""

from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from rabo.cli.follow import Following, follow
from rabo.cli.options import TaskGroup, task_command
from rabo.runs.experiment import Experiment, run
from rabo.runs.summary import print_result
from rabo.runs.terminal import console
from rabo.tasks import TASKS

app = typer.Typer(
    cls=TaskGroup,
    help="Run an algorithm on a task; the folder of the run has all that happened.",
    epilog="Example: rabo run digits --capacities 1,1/2,1/4 --rounds 20 --out runs/first",
    no_args_is_help=True,
)


@dataclass(frozen=True, kw_only=True)
class RunOptions(Following):
    """Options of a run that do not change its result."""

    out: Annotated[Path | None, "folder of the run (runs/...)"] = None


def run_task(experiment: Experiment, options: RunOptions) -> None:
    """Run an experiment and print its result."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = options.out or Path("runs") / f"{experiment.task}-{experiment.algorithm}-{stamp}"
    result = follow(experiment, folder, options, partial(run, experiment, folder))
    print_result(result, folder, console)


for _name, _kind in TASKS.items():
    _example = f"Example: rabo run {_name} {_kind.example}"
    app.command(_name, epilog=_example)(task_command(_name, run_task, RunOptions))
