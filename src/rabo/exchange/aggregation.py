"""How the server makes one value of an entry from those of the clients that hold it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rabo.exchange.covering import Covered, CoveredMean, squared
from rabo.pruning.submodel import Part
from rabo.tree import Params


@dataclass(frozen=True)
class Aggregate:
    """The mean of an entry, its median, or its mean without the extremes, over covering clients.

    Of C values, ⌊trim·C⌋ from each end do not count; of a median, all but the middle one or two.
    Departs from lines 12-20 and 25-33 of Algorithm 1, whose mean one client can send anywhere.
    """

    kind: Literal["mean", "median", "trimmed"] = "mean"
    trim: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in ("mean", "median", "trimmed"):
            raise ValueError(f"aggregate must be mean, median or trimmed, got {self.kind!r}")
        if not 0 <= self.trim < 0.5:
            raise ValueError(f"trim must lie in [0, 0.5), got {self.trim}")

    def begin(self, like: Params) -> Covered:
        """Return what collects the replies of one exchange."""
        return CoveredMean(like) if self.kind == "mean" else CoveredTrimmed(like, self)

    def num_trimmed(self, count: Tensor) -> Tensor:
        """Return how many of so many values do not count, at each end."""
        if self.kind == "median":
            return (count - 1).clamp(min=0) // 2
        share = self.trim if self.kind == "trimmed" else 0.0
        return (share * count.double() + 1e-9).floor().to(count.dtype)  # 0.29·100 is 29

    def largest(self, values: Sequence[float]) -> float:
        """Return the largest number that counts."""
        skipped = int(self.num_trimmed(torch.tensor(len(values))))
        return sorted(values)[len(values) - 1 - skipped]


class CoveredTrimmed(Covered):
    """Keeps every reply until all are there: its memory grows with the number of clients."""

    def __init__(self, like: Params, aggregate: Aggregate):
        super().__init__(like)
        self._aggregate = aggregate
        self._replies: list[tuple[Part, Tensor]] = []

    def add(self, part: Part, values: Params) -> None:
        flat = part.flatten(values).clone()
        self._replies.append((part, flat))
        self._squares.append(squared(flat))
        self.holders.add(part)

    def _average(self) -> Tensor:
        count = self.flat_count
        rows = [self._row(part, values) for part, values in self._replies]
        if not rows:
            return torch.zeros_like(self.lay(self.like))
        skipped = self._aggregate.num_trimmed(count)
        ranked = torch.stack(rows).sort(dim=0).values  # those who do not hold an entry come last
        rank = torch.arange(len(rows), device=count.device).unsqueeze(1)
        counts = (rank >= skipped) & (rank < count - skipped)
        return ranked.where(counts, 0).sum(dim=0) / (count - 2 * skipped).clamp(min=1)

    def _apart(self, common: Tensor) -> Tensor:
        total = torch.zeros_like(common)
        for part, values in self._replies:
            held = torch.zeros_like(self.flat_count)
            part.count_in(held)
            total += (part.place(values) - self.flat_mean * held).double().square().sum()
        return total

    def _row(self, part: Part, values: Tensor) -> Tensor:
        held = torch.zeros_like(self.flat_count)
        part.count_in(held)
        return part.place(values).masked_fill(held == 0, torch.inf)
