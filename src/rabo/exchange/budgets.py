"""What a client has, and the widest submodel that fits it."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rabo.exchange.cost import Cost

WIDTHS = tuple(k / 16 for k in range(16, 0, -1))  # what a budget chooses from

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{u}b": n for u, n in _UNITS.items()}
_UNITS |= {f"{u}ib": 1024**i for i, u in enumerate("kmgt", start=1)}


def parse_amount(text: str | float) -> int:
    """Read "512MB", "1.5G" or a plain number."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", str(text).lower())
    if not match or match[2] not in _UNITS:
        raise ValueError(f"an amount must look like 512MB, 2GiB or 1e9, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits of one client; None is no limit. Amounts may be written "512MB"."""

    memory: int | str | None = None  # bytes of live tensors at the peak
    multiply_adds: float | str | None = None  # per round
    traffic: int | str | None = None  # bytes per round, both directions

    def __post_init__(self) -> None:
        if not self.limits():
            raise ValueError("a budget must have a limit, got none; give memory='512MB', say")
        for name, limit in self.limits().items():
            if limit <= 0:
                raise ValueError(f"a budget must be positive, got {name} = {limit}")

    def limits(self) -> dict[str, int]:
        given = {
            "memory": self.memory,
            "multiply_adds": self.multiply_adds,
            "traffic": self.traffic,
        }
        return {name: parse_amount(limit) for name, limit in given.items() if limit is not None}

    def exceeded_by(self, cost: Cost) -> str | None:
        """Say which limit a cost breaks, or None."""
        spent = {
            "memory": cost.peak_memory_bytes,
            "multiply_adds": cost.multiply_adds,
            "traffic": cost.bytes_up + cost.bytes_down,
        }
        for name, limit in self.limits().items():
            if spent[name] > limit:
                return f"{name} of {spent[name]:,} exceeds {limit:,}"
        return None


Now: TypeAlias = float | Budget
Resources: TypeAlias = Now | Sequence[Now] | Callable[[int], Now]


def check_capacity(capacity: float) -> float:
    if not isinstance(capacity, (int, float)) or not 0 < capacity <= 1:
        raise ValueError(
            f"a capacity must lie in (0, 1] (a fraction of the width), got {capacity!r}"
        )
    return float(capacity)


def at_round(resources: Resources, round: int) -> Now:
    """Return what a client has in one round; a trace that has ended repeats its last entry."""
    if callable(resources):
        now = resources(round)
    elif isinstance(resources, Sequence):
        now = resources[min(round, len(resources) - 1)]
    else:
        now = resources
    return now if isinstance(now, Budget) else check_capacity(now)


@dataclass(frozen=True)
class Absent:
    """A client that sits a round out, and why."""

    why: str


def width_for(now: Now, cost_at: Callable[[float], Cost]) -> float | Absent:
    """Return the widest submodel that fits, by bisection over `WIDTHS`: costs grow with width."""
    if not isinstance(now, Budget):
        return now
    why = now.exceeded_by(cost_at(WIDTHS[-1]))
    if why:
        return Absent(f"no submodel fits: at width 1/16, {why}")
    fits, too_wide = len(WIDTHS) - 1, -1
    while fits - too_wide > 1:
        middle = (fits + too_wide) // 2
        if now.exceeded_by(cost_at(WIDTHS[middle])):
            too_wide = middle
        else:
            fits = middle
    return WIDTHS[fits]
