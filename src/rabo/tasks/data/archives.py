"""Named files in a folder, a zip or a tar, read without unpacking anything to disk."""

import tarfile
import zipfile
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

DAMAGED = (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, OSError)


class Drawings(Protocol):
    """PNG files named part/alphabet/character/file.png, whatever holds them."""

    @property
    def path(self) -> Path:
        """The archive or folder itself, to be named in errors."""
        ...

    def stamps(self) -> dict[str, str]:
        """Every name, sorted, with a text that changes when the file changes."""
        ...

    def read(self, names: Collection[str]) -> Iterator[bytes]:
        """The contents of the named files, in the order of names."""
        ...


@dataclass(frozen=True)
class ZippedDrawings:
    """The drawings in a zip such as images_background.zip."""

    path: Path

    def stamps(self) -> dict[str, str]:
        try:
            with zipfile.ZipFile(self.path) as archive:
                entries = archive.infolist()
        except DAMAGED as error:
            raise damaged(self.path, "zip", error) from error
        stamps = {e.filename: f"{e.file_size}:{e.CRC}" for e in entries}
        return {name: stamps[name] for name in sorted(stamps) if is_drawing(name)}

    def read(self, names: Collection[str]) -> Iterator[bytes]:
        try:
            with zipfile.ZipFile(self.path) as archive:
                for name in names:
                    yield archive.read(name)
        except DAMAGED as error:
            raise damaged(self.path, "zip", error) from error


@dataclass(frozen=True)
class UnpackedDrawings:
    """The drawings below a folder such as images_background/."""

    path: Path

    def stamps(self) -> dict[str, str]:
        stamps = {}
        for file in sorted(self.path.glob("*/*/*.png")):
            status = file.stat()
            name = file.relative_to(self.path.parent).as_posix()
            stamps[name] = f"{status.st_size}:{status.st_mtime_ns}"
        return {name: stamp for name, stamp in stamps.items() if is_drawing(name)}

    def read(self, names: Collection[str]) -> Iterator[bytes]:
        for name in names:
            yield (self.path.parent / name).read_bytes()


def is_drawing(name: str) -> bool:
    """Whether this is a drawing, not a folder or what an operating system leaves beside files."""
    parts = name.split("/")
    hidden = any(part.startswith((".", "__")) for part in parts)
    return len(parts) == 4 and name.endswith(".png") and not hidden


def read_tar(path: Path, names: Collection[str]) -> dict[str, bytes]:
    """The named members of a tar; a member's name is compared, never used as a path."""
    found = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                # A link could lead anywhere, so only plain files count.
                wanted = member.isfile() and member.name in names
                if wanted and (content := archive.extractfile(member)) is not None:
                    found[member.name] = content.read()
    except DAMAGED as error:
        raise damaged(path, "tar", error) from error
    return found


def damaged(path: Path, kind: str, error: Exception) -> ValueError:
    """The error for an archive that cannot be read to its end."""
    size = path.stat().st_size
    return ValueError(
        f"{path} must be a complete {kind} archive, got {size} bytes that cannot be read "
        f"({error}); delete it and fetch it again"
    )
