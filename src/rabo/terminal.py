"""What all commands share: where they print, and how they fail."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from rabo.errors import ClientError

console = Console()
errors = Console(stderr=True)


def guarded(work: Callable[[], Any], folder: Path, advice: str = "") -> Any:
    """Turn what a user can mend into one line, and keep what was reached."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, stop)  # as Ctrl-C: what was reached is kept
    try:
        return work()
    except KeyboardInterrupt:
        errors.print(
            f"[yellow]interrupted[/]: the rounds so far are in {folder}{advice}",
            highlight=False,
            soft_wrap=True,
        )
        raise typer.Exit(130) from None
    except (ValueError, ImportError, ArithmeticError, OSError, ClientError) as error:
        errors.print(f"[red]error[/]: {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
