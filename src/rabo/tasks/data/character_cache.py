"""Characters kept on disk once they are resized, and trusted only while nothing has changed."""

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from rabo.tasks.data.characters import Characters

log = logging.getLogger(__name__)


def cached(
    name: str, fingerprint: str, folders: Sequence[Path], build: Callable[[], Characters]
) -> Characters:
    """The characters from the first folder that has them, else built and written to one.

    fingerprint stands for everything that the characters are built from.
    """
    files = [folder / f"{name}-{fingerprint[:16]}.safetensors" for folder in folders]
    for file in files:
        if file.is_file() and (characters := read(file, fingerprint)) is not None:
            return characters
    characters = build()
    content = save(to_tensors(characters, fingerprint))
    if not any(write(file, content) for file in files):
        log.info("%s is not cached: no folder of %s can be written", name, list(map(str, folders)))
    return characters


def to_tensors(characters: Characters, fingerprint: str) -> dict[str, Tensor]:
    """Everything as tensors, since plain safetensors bytes are read back without metadata."""
    words = json.dumps([characters.alphabets, characters.names]).encode()
    images = characters.images.cpu().contiguous()
    labels = torch.tensor(list(words), dtype=torch.uint8)
    return {"images": images, "labels": labels, "digest": digest(images, labels, fingerprint)}


def digest(images: Tensor, labels: Tensor, fingerprint: str) -> Tensor:
    """The sha256 of images, labels and what they were built from."""
    sha = hashlib.sha256(fingerprint.encode())
    sha.update(labels.numpy().tobytes())
    sha.update(images.numpy().tobytes())
    return torch.from_numpy(np.frombuffer(sha.digest(), np.uint8).copy())


def read(file: Path, fingerprint: str) -> Characters | None:
    """The cached characters, or None where the file is not what was written."""
    try:
        tensors = load(file.read_bytes())
        images, labels = tensors["images"], tensors["labels"]
        if not torch.equal(tensors["digest"], digest(images, labels, fingerprint)):
            raise ValueError("its content does not have the digest it was written with")
        alphabets, names = json.loads(labels.numpy().tobytes())
        return Characters(images, tuple(alphabets), tuple(names))
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        log.info("%s is damaged and will be built again: %s", file, error)
        return None


def write(file: Path, content: bytes) -> bool:
    """Write under another name and then move, so that a reader never sees half a file."""
    half = file.with_name(f"{file.name}.{uuid.uuid4().hex}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        half.write_bytes(content)
        os.replace(half, file)
    except OSError as error:
        log.info("%s cannot be written: %s", file, error)
        return False
    finally:
        remove_half(half)
    return True


def remove_half(half: Path) -> None:
    """Remove what an interrupted write left; after a good one there is nothing."""
    if half.is_file():
        half.unlink()
