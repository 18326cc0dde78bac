"""Where data sets lie on disk, and how a missing file is fetched."""

import os
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from rabo.errors import needs


def data_root(given: str | Path | None = None) -> Path:
    """The folder of the data sets: given, else $RABO_DATA, else the user's cache."""
    root = Path(given or os.environ.get("RABO_DATA") or user_cache()).expanduser()
    if root.exists() and not root.is_dir():
        raise ValueError(
            f"the data root must be a folder, got the file {root}; "
            "pass --data-root or set RABO_DATA to the folder that holds the data sets"
        )
    return root


def user_cache() -> Path:
    """The user's folder for data that rabo downloads or prepares."""
    with needs("tasks", "data sets"):
        import pooch
    return Path(pooch.os_cache("rabo"))


def fetch(url: str, checksum: str, path: Path, progress: bool = True) -> Path:
    """Download url to path, unless path is already there with this checksum ("md5:0123...").

    The file is written under a temporary name and moved only once its checksum is right.
    """
    if path.exists():
        check_present(path, checksum)
        return path
    with needs("tasks", "downloads"):
        import pooch
    advice = f"download it by hand to {path}, or pass --data-root with a folder that has it"
    with DownloadBar(path.name, show=progress) as bar:
        # pooch takes a bar object and its own downloaders, but its annotations allow neither.
        downloader: Any = pooch.HTTPDownloader(chunk_size=2**16)
        downloader.progressbar = bar
        try:
            pooch.retrieve(url, checksum, path.name, path.parent, downloader=downloader)
        except ValueError as error:
            raise ValueError(
                f"{url} must have the checksum {checksum}: {error} {advice}"
            ) from error
        except OSError as error:
            raise OSError(f"{url} could not be downloaded to {path}: {error}; {advice}") from error
    return path


def check_present(path: Path, checksum: str) -> None:
    """Refuse a file of another checksum: it may be the user's own, so it is not replaced."""
    with needs("tasks", "data sets"):
        import pooch
    algorithm, _, expected = checksum.partition(":")
    found = pooch.file_hash(str(path), alg=algorithm)
    if found != expected.lower():
        raise ValueError(
            f"{path} must have the {algorithm} checksum {expected}, got {found}; "
            "delete it to download it again"
        )


class DownloadBar:
    """A progress bar with the members that pooch uses: total, update, reset, close."""

    def __init__(self, name: str, show: bool) -> None:
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        hidden = not (show and console.is_terminal)
        self.progress = Progress(*columns, console=console, disable=hidden)
        self.task = self.progress.add_task(name, total=None)

    def __enter__(self) -> "DownloadBar":
        self.progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def total(self) -> float | None:
        return self.progress.tasks[0].total

    @total.setter
    def total(self, num_bytes: int) -> None:
        # A server that does not say the length is reported as 0, which rich would show as full.
        self.progress.update(self.task, total=num_bytes or None)

    def update(self, num_bytes: int) -> None:
        self.progress.advance(self.task, num_bytes)

    def reset(self) -> None:
        # Keeps the clock running: pooch resets only to set the final count.
        self.progress.update(self.task, completed=0)

    def close(self) -> None:
        self.progress.stop()
