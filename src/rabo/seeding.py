"""Random streams that depend on what they are for, not on who ran before."""

import hashlib

import torch
from torch import Generator


def seed_of(*path: int | str) -> int:
    """Turn a seed and a purpose into 63 well mixed bits."""
    digest = hashlib.sha256(repr(path).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def stream(*path: int | str) -> Generator:
    """Return the generator of (seed, round, client, purpose, ...).

    Neither the order in which clients run nor the process they run in changes a draw.
    """
    return torch.Generator().manual_seed(seed_of(*path))
