"""Submodels as really smaller tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
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

    @property
    def names(self) -> list[str]:
        """The tensors, in the order in which they are laid side by side."""
        ...

    def extract(self, full: Params) -> dict[str, Tensor]:
        """Return θ ⊙ m as the tensors the client computes with."""
        ...

    def expand(self, part: Params) -> dict[str, Tensor]:
        """Return the part at its place among zeros; gradients flow through."""
        ...

    def positions(self) -> Tensor | None:
        """Where the part's entries lie among all, tensors side by side as in `names`; None: all."""
        ...

    def flatten(self, part: Params) -> Tensor:
        """Return the entries of a part in the order of its positions."""
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
    kept: Tensor  # whether each unit is kept, and True for positions that always are
    axes: Mapping[str, Mapping[int, Tensor]]  # the unit of every position of every dimension
    num_units: int = 0
    device: torch.device | None = None

    @property
    def names(self) -> list[str]:
        return list(self.shapes)

    def extract(self, full: Params) -> dict[str, Tensor]:
        return {name: self._select(name, value) for name, value in full.items()}

    def expand(self, part: Params) -> dict[str, Tensor]:
        return {name: self._place(name, value) for name, value in part.items()}

    def flatten(self, part: Params) -> Tensor:
        return torch.cat([part[name].reshape(-1) for name in self.shapes])

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

    def positions(self) -> Tensor | None:
        if not self.index:
            return None
        found, start = [], 0
        for name, shape in self.shapes.items():
            kept = self.index.get(name, {})
            places = torch.zeros((), dtype=torch.int64, device=self.device)
            for dim, size in enumerate(shape):
                own = kept[dim] if dim in kept else torch.arange(size, device=self.device)
                places = places.unsqueeze(-1) * size + own
            found.append(places.reshape(-1) + start)
            start += prod(shape)
        return torch.cat(found)

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

    @property
    def names(self) -> list[str]:
        return list(self.mask)

    def extract(self, full: Params) -> dict[str, Tensor]:
        return {name: value * self.mask[name] for name, value in full.items()}

    def expand(self, part: Params) -> dict[str, Tensor]:
        return self.extract(part)

    def positions(self) -> Tensor | None:
        return None

    def flatten(self, part: Params) -> Tensor:
        values = self.extract(part)
        return torch.cat([values[name].reshape(-1) for name in self.mask])

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
    rows = {
        (name, dim): is_kept[units].nonzero().squeeze(1)
        for name, dims in channels.axes.items()
        for dim, units in dims.items()
        if not is_kept[units].all()  # a whole dimension needs no index
    }
    if rows and device is not None and device.type != "cpu":  # one transfer for all
        sizes = [len(row) for row in rows.values()]
        there = torch.cat(list(rows.values())).to(device, non_blocking=True).split(sizes)
        rows = dict(zip(rows, there, strict=True))
    num_units = sum(len(units) for units in kept.values())
    halves = {}
    for level in ("x", "y"):
        shapes, axes = channels.of(level)
        index: dict[str, dict[int, Tensor]] = {}
        for (name, dim), row in rows.items():
            if name.startswith(f"{level}."):
                index.setdefault(name[2:], {})[dim] = row
        counted = num_units if level == "x" else 0  # both halves are described by the same units
        halves[level] = Submodel(shapes, index, is_kept, axes, counted, device)
    return Cut(halves["x"], halves["y"], dict(kept))
