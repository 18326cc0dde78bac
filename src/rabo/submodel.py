"""Submodels as really smaller tensors, and the mean over the clients that held an entry."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from rabo.channels import ALWAYS, Channels
from rabo.tree import Params, num_bytes


def level_of(name: str) -> Literal["x", "y"]:
    """Say how a vector is shaped by its name: like x if it begins with x, else like y."""
    return "x" if name.startswith("x") else "y"


class Part(Protocol):
    """The entries of a parameter tree that one client holds (m in the paper)."""

    def extract(self, full: Params) -> dict[str, Tensor]:
        """Return θ ⊙ m as the tensors the client computes with."""
        ...

    def expand(self, part: Params) -> dict[str, Tensor]:
        """Return the part at its place among zeros; gradients flow through."""
        ...

    def add_to(self, total: Mapping[str, Tensor], part: Params) -> None:
        """Add the part to running sums, in place."""
        ...

    def held(self) -> dict[str, Tensor]:
        """Return 1 where an entry is held and 0 elsewhere, broadcastable to the full tensors."""
        ...

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors the client computes with."""
        ...

    def num_entries(self) -> int: ...

    def num_bytes(self, part: Params) -> int:
        """Return what tensors of this part take when they travel."""
        ...

    def index_bytes(self) -> int:
        """Return what it takes to say which entries these are."""
        ...


@dataclass(frozen=True, eq=False)
class Submodel:
    """An index vector for each cut dimension of each tensor."""

    shapes: Mapping[str, tuple[int, ...]]
    index: Mapping[str, Mapping[int, Tensor]]
    num_units: int = 0
    device: torch.device | None = None

    def extract(self, full: Params) -> dict[str, Tensor]:
        return {name: self._select(name, value) for name, value in full.items()}

    def expand(self, part: Params) -> dict[str, Tensor]:
        return {name: self._place(name, value) for name, value in part.items()}

    def add_to(self, total: Mapping[str, Tensor], part: Params) -> None:
        for name, value in part.items():
            if name in self.index:
                total[name][self._grid(name)] += value
            else:
                total[name].add_(value)

    def held(self) -> dict[str, Tensor]:
        return {name: self._held(name) for name in self.shapes}

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        found = {}
        for name, shape in self.shapes.items():
            kept = self.index.get(name, {})
            found[name] = tuple(len(kept[d]) if d in kept else n for d, n in enumerate(shape))
        return found

    def num_entries(self) -> int:
        return sum(map(prod, self.tensor_shapes().values()))

    def num_bytes(self, part: Params) -> int:
        return num_bytes(part)

    def index_bytes(self) -> int:
        return 4 * self.num_units

    @cached_property
    def _grids(self) -> dict[str, tuple[Tensor | slice, ...]]:
        return {}

    def _grid(self, name: str) -> tuple[Tensor | slice, ...]:
        """Return index vectors shaped to select their outer product."""
        if name not in self._grids:
            kept = self.index[name]
            rank = max(kept) + 1
            if len(kept) == 1:
                self._grids[name] = (slice(None),) * (rank - 1) + (kept[rank - 1],)
            else:
                sizes = self.shapes[name]
                rows = [
                    kept.get(d, torch.arange(sizes[d], device=self.device)) for d in range(rank)
                ]
                self._grids[name] = tuple(
                    row.reshape([-1 if d == e else 1 for e in range(rank)])
                    for d, row in enumerate(rows)
                )
        return self._grids[name]

    def _select(self, name: str, value: Tensor) -> Tensor:
        for dim, idx in self.index.get(name, {}).items():
            value = value.index_select(dim, idx)
        return value

    def _place(self, name: str, value: Tensor) -> Tensor:
        for dim, idx in self.index.get(name, {}).items():
            shape = list(value.shape)
            shape[dim] = self.shapes[name][dim]
            value = value.new_zeros(shape).index_copy(dim, idx, value)
        return value

    def _held(self, name: str) -> Tensor:
        shape = self.shapes[name]
        held = torch.ones([1] * len(shape), dtype=torch.int32, device=self.device)
        for dim, idx in self.index.get(name, {}).items():
            row = torch.zeros(shape[dim], dtype=torch.int32, device=self.device)
            row[idx] = 1
            held = held * row.reshape([-1 if d == dim else 1 for d in range(len(shape))])
        return held


@dataclass(frozen=True, eq=False)
class ElementMask:
    """Single entries, for policies that do not cut whole channels: saves traffic, not work."""

    mask: Mapping[str, Tensor]

    def extract(self, full: Params) -> dict[str, Tensor]:
        return {name: value * self.mask[name] for name, value in full.items()}

    def expand(self, part: Params) -> dict[str, Tensor]:
        return self.extract(part)

    def add_to(self, total: Mapping[str, Tensor], part: Params) -> None:
        for name, value in self.extract(part).items():
            total[name].add_(value)

    def held(self) -> dict[str, Tensor]:
        return {name: mask.to(torch.int32) for name, mask in self.mask.items()}

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(mask.shape) for name, mask in self.mask.items()}

    def num_entries(self) -> int:
        return sum(int(mask.sum()) for mask in self.mask.values())

    def num_bytes(self, part: Params) -> int:
        return sum(int(self.mask[name].sum()) * v.element_size() for name, v in part.items())

    def index_bytes(self) -> int:
        return sum((mask.numel() + 7) // 8 for mask in self.mask.values())


class Cut(NamedTuple):
    """The two submodels of one client: dual pruning.

    `kept` says which units are kept, by group; a problem that is made of modules needs only how
    many, a problem that is made of matrices needs which.
    """

    x: Part
    y: Part
    kept: Mapping[str, Tensor]

    @property
    def widths(self) -> tuple[tuple[str, int], ...]:
        """How many units are kept in each group: equal for clients of equal shape."""
        return tuple((group, len(units)) for group, units in self.kept.items())


def cut(channels: Channels, kept: Mapping[str, Tensor], device: torch.device | None = None) -> Cut:
    """Turn the kept units of each group into index vectors for x and y (Algorithm 1, line 5)."""
    is_kept = torch.zeros(channels.num_units + 1, dtype=torch.bool)
    for group, units in kept.items():
        is_kept[channels.offsets[group] + units.cpu()] = True
    is_kept[ALWAYS] = True
    index = {
        name: {
            dim: is_kept[units].nonzero().squeeze(1)
            for dim, units in dims.items()
            if not is_kept[units].all()  # a whole dimension needs no index
        }
        for name, dims in channels.axes.items()
    }
    num_units = sum(len(units) for units in kept.values())
    halves = {}
    for level in ("x", "y"):
        prefix = f"{level}."
        halves[level] = Submodel(
            {n.removeprefix(prefix): s for n, s in channels.shapes.items() if n.startswith(prefix)},
            {
                n.removeprefix(prefix): {d: i.to(device) for d, i in dims.items()}
                for n, dims in index.items()
                if n.startswith(prefix) and dims
            },
            num_units if level == "x" else 0,  # both halves are described by the same units
            device,
        )
    return Cut(halves["x"], halves["y"], dict(kept))


class Covered(ABC):
    """One value for every entry from the clients that hold it, and how many they are."""

    def __init__(self) -> None:
        self.times: Counter[Part] = Counter()

    @abstractmethod
    def add(self, part: Part, values: Params) -> None:
        """Take in what one client has answered."""

    @abstractmethod
    def mean(self) -> dict[str, Tensor]:
        """Return the mean, or what stands for it, where somebody answered, and zero elsewhere."""

    @abstractmethod
    def sum(self) -> dict[str, Tensor]:
        """Return the mean times the number of clients that hold an entry."""

    @cached_property
    def count(self) -> dict[str, Tensor]:
        """How many clients hold each entry (C^k), broadcastable; call it when all have answered."""
        count: dict[str, Tensor] = {}
        for part, times in self.times.items():
            for name, held in part.held().items():
                count[name] = count[name] + times * held if name in count else times * held
        return count

    def step(self, full: Params, size: float) -> dict[str, Tensor]:
        """Return θ − size·mean; an entry nobody holds stays bit for bit (lines 16 and 29)."""
        return {
            name: full[name] - size * mean if name in self.count else full[name]
            for name, mean in self.mean().items()
        }


class CoveredMean(Covered):
    """A running sum and a count: the mean over the clients that hold an entry (lines 12-20).

    Of every reply only the sum is kept, so its memory does not grow with the number of clients.
    """

    def __init__(self, like: Params):
        super().__init__()
        self.total = {name: torch.zeros_like(value) for name, value in like.items()}

    def add(self, part: Part, values: Params) -> None:
        part.add_to(self.total, values)
        self.times[part] += 1

    def mean(self) -> dict[str, Tensor]:
        return {
            name: total / self.count[name].clamp(min=1) if name in self.count else total
            for name, total in self.total.items()
        }

    def sum(self) -> dict[str, Tensor]:
        return self.total
