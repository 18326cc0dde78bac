"""Random streams that depend on what they are for, not on who ran before."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Generator, Tensor


def seed_of(*path: int | str) -> int:
    """Turn a seed and a purpose into 63 well mixed bits."""
    digest = hashlib.sha256(repr(path).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def stream(*path: int | str) -> Generator:
    """Return the generator of (seed, round, client, purpose, ...).

    Neither the order in which clients run nor the process they run in changes a draw.
    """
    return torch.Generator().manual_seed(seed_of(*path))


@contextmanager
def seeded_layers(seed: int, tensors: Iterable[Tensor]) -> Iterator[None]:
    """Seed the generators that layers such as dropout use; restore them at the end.

    Only the CPU and the GPUs that hold the tensors are seeded: `torch.manual_seed` costs ten times
    as much on a machine without a GPU.
    """
    devices = sorted({t.device.index for t in tensors if t.is_cuda})
    with torch.random.fork_rng(devices=devices, device_type="cuda"):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        yield
