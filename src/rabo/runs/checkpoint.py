"""A run between two rounds as a file: written whole or not at all, and read with suspicion."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from rabo.algorithms import State
from rabo.errors import CheckpointError
from rabo.exchange.cost import Cost
from rabo.federation.ledger import Books
from rabo.federation.rounds import Snapshot
from rabo.tree import Params

VERSION = "1"
SHARE = 1 / 20  # of a run's time that writing may take, where nothing else is asked for


class DamagedCheckpointError(CheckpointError):
    """A file that is not what was once written: an older one may still be good."""


class Checkpoints:
    """DIR/checkpoints/round-000000010.safetensors and the one before it.

    One is written after every `every` rounds; with None, after a round as long as writing takes a
    twentieth of the time at most. `identity` says of which run they are: plain options, compared
    when a checkpoint is read. Before one is written, `secure` makes sure that the record of its
    rounds is on disk.
    """

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, Any],
        every: int | None = None,
        secure: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.folder = folder / "checkpoints"
        self._identity, self._every, self._secure, self._clock = identity, every, secure, clock
        self._pending: Snapshot | None = None
        self._next = clock()  # when the next one is due

    def add(self, snapshot: Snapshot) -> None:
        """Take note of a round that is done, and write it if it is time."""
        self._pending = snapshot
        if self._every is None:
            due = self._clock() >= self._next
        else:
            due = snapshot.state.round % self._every == 0
        if due:
            self.flush()

    def flush(self) -> None:
        """Write the last round that was done, unless it is written."""
        if self._pending is None:
            return
        start = self._clock()
        self._secure()
        self._write(self._pending)
        self._pending = None
        end = self._clock()
        self._next = end + (end - start) * (1 / SHARE - 1)

    def latest(self, like: State, say: Callable[[str], None]) -> Snapshot | None:
        """Read the newest good checkpoint, None if there is none yet; `like` has its shapes.

        One that is damaged is passed over, and said so; one of another run, version or shape is
        refused.
        """
        paths = self._paths()
        for path in reversed(paths):
            try:
                return self._read(path, like)
            except DamagedCheckpointError as error:
                say(str(error))
        if paths:
            raise CheckpointError(
                f"every checkpoint in {self.folder} is damaged; remove them to start anew"
            )
        return None

    def _write(self, snapshot: Snapshot) -> None:
        number = snapshot.state.round
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"round-{number:09}.safetensors"
        write_atomically(path, _encode(snapshot, self._identity))
        # the one before stays; later ones belong to rounds that are being done again
        older = [other for other in self._paths() if other.name < path.name][-1:]
        for other in self.folder.glob("*round-*"):  # and what a killed process left
            if other not in (path, *older):
                other.unlink()

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("round-*.safetensors"))

    def _read(self, path: Path, like: State) -> Snapshot:
        about, tensors = _decode(path)
        different = [
            f"{name} is {about['identity'].get(name)!r} there and {value!r} here"
            for name, value in self._identity.items()
            if about["identity"].get(name) != value
        ]
        if different:
            raise CheckpointError(f"{path} is of another run: {'; '.join(different)}")
        snapshot = _snapshot(about, tensors, like)
        _check_shapes(path, snapshot.state, like)
        return snapshot


def write_atomically(path: Path, data: bytes) -> None:
    """Put a file in place so that, whatever happens, either the old or the new one is there."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _encode(snapshot: Snapshot, identity: Mapping[str, Any]) -> bytes:
    state, books = snapshot.state, snapshot.books
    trees = {"x": state.x, "y": state.y}
    trees |= {f"vectors/{name}": tree for name, tree in state.vectors.items()}
    trees |= {f"trained/{level}": tree for level, tree in books.trained.items()}
    tensors = {
        f"{path}/{name}": value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for path, tree in trees.items()
        for name, value in tree.items()
    }
    about = {
        "identity": identity,
        "round": state.round,
        "scalars": dict(state.scalars),
        "total": books.total,
        "by_phase": books.by_phase,
        "minimum": books.minimum,
        "full_cost": snapshot.full_cost,
        "trees": list(trees),
        "tensors": [[name, *_kind(value)] for name, value in tensors.items()],  # order matters
    }
    text = json.dumps(about)
    digest = _digest(text, tensors.values())
    return save(tensors, {"version": VERSION, "checkpoint": text, "sha256": digest})


def _decode(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what a file says about itself and its tensors, in the order they were written."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        version = metadata["version"]
        if version == VERSION:
            text = metadata["checkpoint"]
            about = json.loads(text)
            ordered = {name: tensors.pop(name) for name, *_ in about["tensors"]}
            sizes = [[name, *_kind(value)] for name, value in ordered.items()]
            is_whole = not tensors and sizes == about["tensors"]
            if is_whole and _digest(text, ordered.values()) == metadata["sha256"]:
                return about, ordered
    except Exception as error:  # damage has no limits
        raise DamagedCheckpointError(
            f"{path} is damaged or no checkpoint ({type(error).__name__}: {error})"
        ) from error
    if version != VERSION:
        raise CheckpointError(f"{path} must have version {VERSION}, got {version!r}")
    raise DamagedCheckpointError(f"{path} is damaged: its checksum does not agree")


def _snapshot(about: Mapping[str, Any], tensors: Params, like: State) -> Snapshot:
    device = next(iter(like.x.values())).device
    trees: dict[str, dict[str, Tensor]] = {path: {} for path in about["trees"]}
    for name, value in tensors.items():
        path = next(p for p in sorted(trees, key=len, reverse=True) if name.startswith(f"{p}/"))
        trees[path][name.removeprefix(f"{path}/")] = value.to(device)
    vectors = {p.removeprefix("vectors/"): t for p, t in trees.items() if p.startswith("vectors/")}
    books = Books(
        Cost(*about["total"]),
        {phase: Cost(*cost) for phase, cost in about["by_phase"].items()},
        {"x": trees["trained/x"], "y": trees["trained/y"]},
        about["minimum"],
    )
    state = State(about["round"], trees["x"], trees["y"], vectors, about["scalars"])
    return Snapshot(state, books, Cost(*about["full_cost"]))


def _check_shapes(path: Path, state: State, like: State) -> None:
    for level in ("x", "y"):
        found, wanted = (_kinds(getattr(s, level)) for s in (state, like))
        if list(found.items()) != list(wanted.items()):
            name = next(
                (n for n in [*wanted, *found] if found.get(n) != wanted.get(n)), "its order"
            )
            raise CheckpointError(
                f"{path} is of another model: {level}.{name} must be {wanted.get(name)}, got "
                f"{found.get(name)}"
            )


def _kinds(tree: Params) -> dict[str, list[Any]]:
    return {name: _kind(value) for name, value in tree.items()}


def _kind(value: Tensor) -> list[Any]:
    return [str(value.dtype).removeprefix("torch."), list(value.shape)]


def _digest(text: str, tensors: Iterable[Tensor]) -> str:
    found = hashlib.sha256(text.encode())
    for value in tensors:
        found.update(value.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
