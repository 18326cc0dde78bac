"""Show runs of this process, and tell how to continue the ones that are stopped."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from rich.console import Console

from rabo.federation.rounds import Result
from rabo.runs.experiment import Experiment
from rabo.runs.live import view_of
from rabo.runs.terminal import console, guarded, writers_of
from rabo.runs.writers import Writer


@dataclass(frozen=True, kw_only=True)
class Following:
    """Where the numbers of a run are shown."""

    quiet: Annotated[bool, "print the result alone"] = False
    tensorboard: Annotated[bool, "also write all numbers to RUN/tensorboard"] = False
    mlflow: Annotated[
        bool, "also send all numbers to MLFLOW_TRACKING_URI, or to mlruns beside --out"
    ] = False

    def flags(self) -> str:
        """Return the options that were given, to repeat them."""
        names = [option.name for option in fields(Following) if getattr(self, option.name)]
        return "".join(f" --{name}" for name in names)


def follow(
    experiment: Experiment,
    folder: Path,
    following: Following,
    train: Callable[[Sequence[Writer]], Result],
) -> Result:
    """Train and show it. Missing writers are reported before any data are made."""

    def work() -> Result:
        writers = writers_of(folder, following.tensorboard, following.mlflow)
        if not following.quiet:
            name = f"{experiment.task} · {experiment.algorithm}"
            say(f"{name}: making data and clients, for {folder}")
        return train([*view_of(console, following.quiet), *writers])

    again = f"; to go on: rabo resume {shlex.quote(str(folder))}{following.flags()}"
    return guarded(work, folder, again)


def say(text: str, to: Console = console) -> None:
    """Print a line as it is."""
    to.print(text, markup=False, highlight=False, soft_wrap=True)
