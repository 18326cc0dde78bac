"""`rabo resume`: continue a run from its last checkpoint."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from rabo.cli.follow import Following, follow, say
from rabo.runs.experiment import recorded_experiment, resume
from rabo.runs.summary import print_result
from rabo.runs.terminal import Quiet, ToMLflow, ToTensorBoard, console, errors, guarded


def resume_run(
    folder: Annotated[Path, typer.Argument(help="folder of a run that was stopped")],
    rounds: Annotated[int | None, typer.Option(help="do more rounds than it was to do")] = None,
    device: Annotated[str | None, typer.Option(help="go on on another: auto, cpu or cuda")] = None,
    quiet: Quiet = False,
    tensorboard: ToTensorBoard = False,
    mlflow: ToMLflow = False,
) -> None:
    """Go on with a run from its last checkpoint."""
    experiment = guarded(lambda: recorded_experiment(folder, rounds, device), folder)
    following = Following(quiet=quiet, tensorboard=tensorboard, mlflow=mlflow)
    tell = partial(say, to=errors) if quiet else say  # unusual events are told in any case
    train = partial(resume, experiment, folder, say=tell)
    print_result(follow(experiment, folder, following, train), folder, console)
