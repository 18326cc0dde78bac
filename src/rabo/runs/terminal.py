"""What all commands share: where they print, what else hears of runs, and how they fail."""

import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from rabo.algorithms import StepSizeWarning
from rabo.errors import CapacityWarning, ClientError
from rabo.federation.alarms import BiasWarning, DivergenceWarning
from rabo.runs.writers import MLflow, TensorBoard, Writer

UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
# warnings about a run, for its user
TOLD = (BiasWarning, CapacityWarning, DivergenceWarning, StepSizeWarning)
console = Console()
errors = Console(stderr=True)
Quiet = Annotated[bool, typer.Option("--quiet", help="print the result alone")]
ToTensorBoard = Annotated[
    bool, typer.Option("--tensorboard", help="also write all numbers to RUN/tensorboard")
]
ToMLflow = Annotated[
    bool,
    typer.Option(
        "--mlflow", help="also send all numbers to MLFLOW_TRACKING_URI, or to mlruns beside --out"
    ),
]


def short(number: float) -> str:
    """Write 1234567 as 1.23 M."""
    for size, unit in UNITS:
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"


def writers_of(folder: Path, tensorboard: bool, mlflow: bool) -> list[Writer]:
    """Return what else was asked to hear of the runs in a folder; what is missing is said now."""
    return [*([TensorBoard()] if tensorboard else []), *([MLflow(folder)] if mlflow else [])]


@contextmanager
def told_warnings(say: Callable[[str], None]) -> Iterator[None]:
    """Pass warnings about a run to `say`, without file names and source code."""

    def show(message: Any, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, TOLD):
            say(str(message))
        else:
            before(message, category, *place, **more)

    with warnings.catch_warnings():
        before, warnings.showwarning = warnings.showwarning, show
        for category in TOLD:
            warnings.simplefilter("default", category)
        yield


def _warn(text: str) -> None:
    errors.print(f"[yellow]warning[/]: {escape(text)}", highlight=False, soft_wrap=True)


def guarded(work: Callable[[], Any], folder: Path, advice: str = "") -> Any:
    """Turn what a user can mend into one line, and keep what was reached."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, stop)  # as Ctrl-C: what was reached is kept
    try:
        with told_warnings(_warn):
            return work()
    except (FileExistsError, NotADirectoryError):
        why = f"a file is in the way of the folder {folder}; choose another --out"
        errors.print(f"[red]error[/]: {why}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        if folder.exists():
            kept = f"what was done so far is in {folder}{advice}"
        else:
            kept = "nothing was done yet; give the same command again"
        errors.print(f"[yellow]interrupted[/]: {escape(kept)}", highlight=False, soft_wrap=True)
        raise typer.Exit(130) from None
    except (ValueError, ImportError, ArithmeticError, OSError, ClientError) as error:
        errors.print(f"[red]error[/]: {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
