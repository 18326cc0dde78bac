"""Submodels as really smaller tensors."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from math import prod
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rabo.pruning.channels import ALWAYS, Channels, Row
from rabo.tree import Params, cast, lay, num_bytes, pieces


class Part(ABC):
    """The entries of a parameter tree that one client holds (m in the paper).

    Where many tensors are cut alike it works on all of them laid side by side, one launch for all.
    """

    shapes: Mapping[str, tuple[int, ...]]  # of the full tensors, in their order
    tensor_shapes: Mapping[str, tuple[int, ...]]  # of those that the client computes with
    device: torch.device | None

    @abstractmethod
    def take(self, full: Tensor) -> Tensor:
        """Return what the client computes with, from all entries side by side."""

    @abstractmethod
    def place(self, values: Tensor) -> Tensor:
        """Undo `take`, with zeros for what the client does not hold; gradients flow through."""

    @abstractmethod
    def add_to(self, total: Tensor, values: Tensor, times: int = 1) -> None:
        """Add to all entries side by side what the client holds of them, in place."""

    @abstractmethod
    def num_entries(self) -> int: ...

    @abstractmethod
    def num_bytes(self, part: Params) -> int:
        """Return what tensors of this part take when they travel."""

    @abstractmethod
    def index_bytes(self) -> int:
        """Return what it takes to say which entries these are."""

    def extract(self, full: Params) -> dict[str, Tensor]:
        """Return θ ⊙ m as the tensors the client computes with."""
        taken = self.take(lay([full[name] for name in self.shapes]))
        return cast(pieces(taken, self.tensor_shapes), full)

    def expand(self, part: Params) -> dict[str, Tensor]:
        """Return the part at its place among zeros; gradients flow through."""
        placed = self.place(torch.cat([part[name].reshape(-1) for name in self.shapes]))
        return cast(pieces(placed, self.shapes), part)

    def flatten(self, part: Params) -> Tensor:
        """Return the tensors of a part side by side."""
        return lay([part[name] for name in self.shapes])

    def held(self) -> dict[str, Tensor]:
        """Return 1 where an entry is held and 0 elsewhere."""
        count = torch.zeros(self.num_full, dtype=torch.int32, device=self.device)
        self.count_in(count)
        return pieces(count, self.shapes)

    def count_in(self, count: Tensor, times: int = 1) -> None:
        """Add a number to the entries that are held, of all side by side."""
        self.add_to(count, count.new_ones(()).expand(self._num_values), times)

    @cached_property
    def num_full(self) -> int:
        return sum(map(prod, self.shapes.values()))

    @cached_property
    def _num_values(self) -> int:
        return sum(map(prod, self.tensor_shapes.values()))


@dataclass(frozen=True, eq=False)
class Submodel(Part):
    """Rows of indices for each cut dimension of each tensor."""

    shapes: Mapping[str, tuple[int, ...]]
    tensor_shapes: Mapping[str, tuple[int, ...]]
    rows: Mapping[str, Sequence[Tensor]]  # whose sums are the positions held; none: all are
    num_units: int = 0
    device: torch.device | None = None

    @property
    def is_whole(self) -> bool:
        return not self.rows

    @cached_property
    def positions(self) -> Tensor:
        """Where the part's entries lie among all, tensors side by side."""
        found = [reduce(lambda a, b: a.unsqueeze(-1) + b, rows) for rows in self.rows.values()]
        return torch.cat([places.reshape(-1) for places in found])

    def take(self, full: Tensor) -> Tensor:
        return full if self.is_whole else full.index_select(0, self.positions)

    def place(self, values: Tensor) -> Tensor:
        if self.is_whole:
            return values
        return values.new_zeros(self.num_full).index_copy(0, self.positions, values)

    def add_to(self, total: Tensor, values: Tensor, times: int = 1) -> None:
        if self.is_whole:
            total.add_(values, alpha=times)
        else:
            total.index_add_(0, self.positions, values, alpha=times)

    def extract(self, full: Params) -> dict[str, Tensor]:
        return dict(full) if self.is_whole else super().extract(full)

    def expand(self, part: Params) -> dict[str, Tensor]:
        return dict(part) if self.is_whole else super().expand(part)

    def num_entries(self) -> int:
        return self._num_values

    def num_bytes(self, part: Params) -> int:
        return num_bytes(part)

    def index_bytes(self) -> int:
        return 4 * self.num_units


@dataclass(frozen=True, eq=False)
class ElementMask(Part):
    """Single entries, for policies that do not cut whole channels: saves traffic, not work."""

    mask: Mapping[str, Tensor]

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return {name: tuple(mask.shape) for name, mask in self.mask.items()}

    @property
    def tensor_shapes(self) -> Mapping[str, tuple[int, ...]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.shapes

    @property
    def device(self) -> torch.device | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return next(iter(self.mask.values())).device

    @cached_property
    def _flat(self) -> Tensor:
        return lay(list(self.mask.values()))

    @cached_property
    def _numbers(self) -> dict[str, int]:
        counts = torch.stack([mask.sum() for mask in self.mask.values()]).tolist()
        return dict(zip(self.mask, counts, strict=True))

    def take(self, full: Tensor) -> Tensor:
        return full * self._flat

    def place(self, values: Tensor) -> Tensor:
        return values * self._flat

    def add_to(self, total: Tensor, values: Tensor, times: int = 1) -> None:
        total.add_(values * self._flat, alpha=times)

    def num_entries(self) -> int:
        return sum(self._numbers.values())

    def num_bytes(self, part: Params) -> int:
        return sum(self._numbers[name] * v.element_size() for name, v in part.items())

    def index_bytes(self) -> int:
        return sum((mask.numel() + 7) // 8 for mask in self.mask.values())


@dataclass(frozen=True, eq=False)
class Cut:
    """The two submodels of one client: dual pruning.

    `kept` says which units are kept, by group; a problem that is made of modules needs only how
    many, a problem that is made of matrices needs which.
    """

    x: Part
    y: Part
    kept: Mapping[str, Tensor]

    def of(self, level: Literal["x", "y"]) -> Part:
        """Return the entries of x, or of y."""
        return self.x if level == "x" else self.y

    @cached_property
    def widths(self) -> tuple[tuple[str, int], ...]:
        """How many units are kept in each group: equal for clients of equal shape."""
        return tuple((group, len(units)) for group, units in self.kept.items())


def cut(channels: Channels, kept: Mapping[str, Tensor], device: torch.device | None = None) -> Cut:
    """Turn the kept units of each group into index vectors for x and y (Algorithm 1, line 5)."""
    is_kept = np.zeros(channels.num_units + 1, dtype=bool)
    for group, units in kept.items():
        is_kept[channels.offsets[group] + units.cpu().numpy()] = True
    is_kept[ALWAYS] = True
    vectors, which = channels.distinct
    chosen = [is_kept[units].nonzero()[0] for units in vectors]
    num_units = sum(units.shape[0] for units in kept.values())
    halves = {}
    for level in ("x", "y"):
        (shapes, _), dims = channels.of(level), which[level]
        small = {
            name: tuple(
                chosen[dims[name][d]].size if d in dims[name] else n for d, n in enumerate(shape)
            )
            if name in dims
            else shape
            for name, shape in shapes.items()
        }
        rows = {} if small == shapes else _rows(channels.layout[level], chosen, device)
        counted = num_units if level == "x" else 0  # both halves are described by the same units
        halves[level] = Submodel(shapes, small, rows, counted, device)
    return Cut(halves["x"], halves["y"], dict(kept))


def _rows(
    layout: Mapping[str, Sequence[Row]], chosen: Sequence[np.ndarray], device: torch.device | None
) -> dict[str, list[Tensor]]:
    """Return what each cut dimension of each tensor adds to a position; one transfer for all."""
    rows = [
        row.start + (row.whole if row.whole is not None else chosen[row.number] * row.stride)
        for own in layout.values()
        for row in own
    ]
    flat = torch.from_numpy(np.concatenate(rows)).to(device, non_blocking=True)
    there = iter(flat.split([row.size for row in rows]))
    return {name: [next(there) for _ in own] for name, own in layout.items()}
