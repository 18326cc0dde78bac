"""How much of a device's memory clients that work as one, and their recordings, may take."""

import sys
from math import ceil, inf

import torch

from rabo.execution.players import SharedPool

PARTS = 8  # a group takes at most one of them of a device's memory, as do all recordings' own pools
_parts = PARTS  # in this process


class Room:
    """What recordings hold so far; those for which there is no room share the memory of one."""

    def __init__(self) -> None:
        self._held = 0
        self._shared = SharedPool()

    def pool(self, device: torch.device, num_bytes: int) -> SharedPool | None:
        """Return what to share for a recording that needs so much; None: it has its own memory."""
        return self._shared if self._held + num_bytes > limit(device) else None

    def take(self, pool: SharedPool | None, num_bytes: int) -> None:
        """Take note of a recording that was made."""
        self._held += 0 if pool else num_bytes


def limit(device: torch.device) -> float:
    """Return the bytes that a group, or the pools of all recordings, may take."""
    if device.type != "cuda":
        return inf  # nothing is held there
    return torch.cuda.get_device_properties(device).total_memory / _parts


def share_device(processes: int) -> None:
    """Leave room for other processes that use the same device.

    Groups and pools of all of them fill two thirds of it; libraries and evaluations need the rest.
    """
    global _parts
    _parts = max(PARTS, 3 * processes)


def most_together(device: torch.device, num_bytes: int) -> int:
    """Return how many clients that need so much each may work as one."""
    return max(1, int(min(limit(device) / max(1, num_bytes), sys.maxsize)))


def evenly(number: int, most: int) -> int:
    """Return the size of groups of one size, or nearly, that are no larger than allowed."""
    return ceil(number / ceil(number / most))
