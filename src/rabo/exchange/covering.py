"""Which entries how many clients hold, and the mean over the clients that held an entry."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from functools import cached_property, reduce

import torch
from torch import Tensor

from rabo.pruning.submodel import Part
from rabo.tree import Params, cast, lay, pieces

MOST_PARTS = 16  # that are remembered before they are counted


def squared(flat: Tensor) -> Tensor:
    """Return ‖flat‖², in float32 or better."""
    dtype = torch.promote_types(flat.dtype, torch.float32)
    return torch.linalg.vector_norm(flat, dtype=dtype).square()


class Holders:
    """Who held which entries: a count per entry, whatever the number of clients.

    Parts are remembered while they are few (clients of equal width often share one) and then added
    to the count, so that memory does not grow with the number of clients.
    """

    def __init__(self, like: Tensor, on_part: Callable[[Part], None] = lambda _: None):
        self._like, self._on_part = like, on_part
        self._times: Counter[Part] = Counter()

    def add(self, part: Part) -> None:
        self._times[part] += 1
        if len(self._times) > MOST_PARTS:
            self._fold()

    def count(self) -> Tensor:
        """Return how many clients hold each entry (C^k), all tensors side by side."""
        self._fold()
        return self._count

    @cached_property
    def _count(self) -> Tensor:
        return torch.zeros_like(self._like, dtype=torch.int32)

    def _fold(self) -> None:
        for part, times in self._times.items():
            self._on_part(part)
            part.count_in(self._count, times)
        self._times.clear()


class Covered(ABC):
    """One value for every entry from the clients that hold it, and how many they are.

    Tensors lie side by side as one vector here; it comes apart where somebody looks by name.
    """

    def __init__(self, like: Params):
        self.like = like
        self._shapes = {name: tuple(value.shape) for name, value in like.items()}
        self.holders = Holders(lay(list(like.values())))
        self._squares: list[Tensor] = []  # ‖value‖² of every reply

    @abstractmethod
    def add(self, part: Part, values: Params) -> None:
        """Take in what one client has answered."""

    @abstractmethod
    def _average(self) -> Tensor:
        """Return the mean, or what stands for it, where somebody answered, and zero elsewhere."""

    @cached_property
    def flat_mean(self) -> Tensor:
        """The mean of every entry, or what stands for it; call it when all have answered."""
        return self._average()

    @cached_property
    def flat_count(self) -> Tensor:
        """How many clients hold each entry (C^k); call it when all have answered."""
        return self.holders.count()

    @cached_property
    def count(self) -> dict[str, Tensor]:
        return pieces(self.flat_count, self._shapes)

    def mean(self) -> dict[str, Tensor]:
        return self.named(self.flat_mean)

    def sum(self) -> dict[str, Tensor]:
        """Return the mean times the number of clients that hold an entry."""
        return self.named(self.flat_mean * self.flat_count)

    def norm(self) -> Tensor:
        """Return the norm of the mean."""
        return torch.linalg.vector_norm(self.flat_mean)

    def disagreement(self) -> Tensor:
        """Return how far replies lie from their mean: (Σ_i‖h_i − mean‖²/Σ_i‖mean‖²)^½.

        Norms are over the entries that a client shares with others; zero if there are none.
        """
        mean, count = self.flat_mean, self.flat_count
        if mean.dtype in (torch.float16, torch.bfloat16):
            mean = mean.float()
        if not self._squares:
            return mean.new_zeros(())
        common = torch.dot(count * mean, mean)
        alone = (count == 1) * mean
        shared = common - torch.dot(alone, alone)
        return torch.where(shared > 0, self._apart(common) / shared, 0.0).sqrt()

    def _apart(self, common: Tensor) -> Tensor:
        """Return Σ_i‖h_i − mean‖²; `common` is Σ_i‖mean‖²."""
        return (torch.stack(self._squares).sum() - common).clamp(min=0)

    def step(self, full: Params, size: float) -> dict[str, Tensor]:
        """Return θ − size·mean; an entry nobody holds stays bit for bit (lines 16 and 29)."""
        return self.named(torch.sub(self.lay(full), self.flat_mean, alpha=size))

    def lay(self, params: Params) -> Tensor:
        return lay([params[name] for name in self.like])

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        return cast(self.split(flat), self.like)

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Undo `lay`, in the precision of the vector."""
        return pieces(flat, self._shapes)


class CoveredMean(Covered):
    """A running sum and a count: the mean over the clients that hold an entry (lines 12-20).

    Of every reply only the sum is kept, so its memory does not grow with the number of clients.
    """

    def __init__(self, like: Params):
        super().__init__(like)
        dtypes = {v.dtype for v in like.values()}
        dtype = reduce(torch.promote_types, dtypes) if dtypes else torch.float32
        self._total = torch.zeros_like(self.lay(like), dtype=dtype)

    def add(self, part: Part, values: Params) -> None:
        flat = part.flatten(values).to(self._total.dtype)
        part.add_to(self._total, flat)
        self._squares.append(squared(flat))
        self.holders.add(part)

    def _average(self) -> Tensor:
        return self._total / self.flat_count.clamp(min=1)

    def sum(self) -> dict[str, Tensor]:
        return self.named(self._total)
