"""Which positions of which tensors are kept or dropped together.

A *group* is a set of coupled dimensions (a residual stream, a hidden layer); its *units* are what
a submodel keeps or drops as a whole: a channel with all its weights, biases and norm parameters,
an attention head, a norm group. Tensors are named "x.NAME" and "y.NAME".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rabo.tree import Params

ALWAYS = -1  # the unit of a position that every submodel keeps


class Row(NamedTuple):
    """What some dimensions of a tensor add to the position of an entry among all of a level."""

    start: int
    whole: np.ndarray | None = None  # of dimensions that are not cut
    number: int = -1  # else that of the vector of units along which the dimension is cut
    stride: int = 0  # of that dimension


@dataclass(frozen=True, eq=False)
class Channels:
    """Groups of units, and for each dimension of each tensor the unit of every position."""

    units: Mapping[str, int]
    axes: Mapping[str, Mapping[int, Tensor]]
    shapes: Mapping[str, tuple[int, ...]]
    whole: Mapping[str, str] = field(default_factory=dict)  # what is never cut, and why

    @cached_property
    def offsets(self) -> dict[str, int]:
        """The first unit of each group in the numbering over all groups."""
        starts = accumulate(self.units.values(), initial=0)
        return dict(zip(self.units, starts, strict=False))

    @property
    def num_units(self) -> int:
        return sum(self.units.values())

    def of(
        self, level: str
    ) -> tuple[Mapping[str, tuple[int, ...]], Mapping[str, Mapping[int, Tensor]]]:
        """Return the shapes and axes of x (or of y) by their own names, the same objects always."""
        return self._levels[level]

    @cached_property
    def _levels(self) -> dict[str, Any]:
        return {
            level: tuple(
                {name[2:]: value for name, value in of.items() if name.startswith(f"{level}.")}
                for of in (self.shapes, self.axes)
            )
            for level in ("x", "y")
        }

    @cached_property
    def distinct(self) -> tuple[list[np.ndarray], dict[str, dict[str, dict[int, int]]]]:
        """The different vectors of units, and which of them each dimension of a tensor has."""
        numbers: dict[bytes, int] = {}
        vectors: list[np.ndarray] = []
        which: dict[str, dict[str, dict[int, int]]] = {"x": {}, "y": {}}
        for name, dims in self.axes.items():
            for dim, units in dims.items():
                vector = units.cpu().numpy()
                number = numbers.setdefault(vector.tobytes(), len(numbers))
                if number == len(vectors):
                    vectors.append(vector)
                which[name[0]].setdefault(name[2:], {})[dim] = number
        return vectors, which

    @cached_property
    def layout(self) -> dict[str, dict[str, list[Row]]]:
        """Where the entries of each tensor of a level lie, tensors side by side."""
        found: dict[str, dict[str, list[Row]]] = {}
        for level in ("x", "y"):
            start, shapes, dims = 0, self.of(level)[0], self.distinct[1][level]
            found[level] = {}
            for name, shape in shapes.items():
                found[level][name] = _layout(start, shape, dims.get(name, {}))
                start += prod(shape)
        return found

    def importance(self, x: Params, y: Params) -> Tensor:
        """Return the sum of squared weights that belong to each unit."""
        params = {f"x.{k}": v for k, v in x.items()} | {f"y.{k}": v for k, v in y.items()}
        sizes = [
            torch.linalg.vector_norm(value, dim=[d for d in range(value.dim()) if d != dim])
            if (value := params[name]).dim() > 1
            else value
            for name, dims in self.axes.items()
            for dim in dims
        ]
        first = next(iter(params.values()), torch.zeros(0))
        scores = first.new_zeros(self.num_units + 1, dtype=torch.float64)
        if sizes:
            squares = torch.cat(sizes).double().square()
            scores.index_add_(0, self._units_of_positions(first.device), squares)
        return scores[:-1]  # the last one collected the positions that are always kept

    def _units_of_positions(self, device: torch.device) -> Tensor:
        """The units of all positions of all dimensions; what is always kept is the last."""
        if device not in self._on_device:
            units = [units.cpu() for dims in self.axes.values() for units in dims.values()]
            self._on_device[device] = (torch.cat(units) % (self.num_units + 1)).to(device)
        return self._on_device[device]

    @cached_property
    def _on_device(self) -> dict[torch.device, Tensor]:
        return {}

    def restricted_to(self, level: str) -> "Channels":
        """Cut only tensors of x (or of y): a group that also touches the other level is whole."""
        other = {"x": "y", "y": "x"}[level]
        return self.without(
            dict.fromkeys(self.groups_of[other], f"joins x and y; only {level} is cut")
        )

    @cached_property
    def groups_of(self) -> dict[str, list[str]]:
        """The groups that cut tensors of x, and those that cut tensors of y; some cut both."""
        return {
            level: [
                group
                for group, start in self.offsets.items()
                if any(
                    ((units >= start) & (units < start + self.units[group])).any()
                    for dims in self.of(level)[1].values()
                    for units in dims.values()
                )
            ]
            for level in ("x", "y")
        }

    def without(self, whole: Mapping[str, str]) -> "Channels":
        """Keep some groups whole, with the reason."""
        units = {group: n for group, n in self.units.items() if group not in whole}
        renumber = torch.full((self.num_units + 1,), ALWAYS)
        start = 0
        for group, n in units.items():
            old = self.offsets[group]
            renumber[old : old + n] = torch.arange(start, start + n)
            start += n
        axes = {}
        for name, dims in self.axes.items():
            kept = {dim: renumber[u.cpu()] for dim, u in dims.items()}
            kept = {dim: u for dim, u in kept.items() if (u != ALWAYS).any()}
            if kept:
                axes[name] = kept
        return Channels(units, axes, self.shapes, {**self.whole, **whole})


def _layout(start: int, shape: Sequence[int], dims: Mapping[int, int]) -> list[Row]:
    """Return a row for each cut dimension; whole ones that follow each other count as one."""
    stride, loose, rows = prod(shape), 1, []
    for dim, size in enumerate(shape):
        stride //= max(1, size)
        number = dims.get(dim)
        if number is None:
            loose *= size
            continue
        if loose > 1:
            rows.append(Row(0, np.arange(loose) * (stride * size)))
        rows.append(Row(0, number=number, stride=stride))
        loose = 1
    if loose != 1 or not rows:
        rows.append(Row(0, np.arange(loose)))
    rows[0] = rows[0]._replace(start=start)
    return rows


def shapes_of(x: Params, y: Params) -> dict[str, tuple[int, ...]]:
    return {f"x.{k}": tuple(v.shape) for k, v in x.items()} | {
        f"y.{k}": tuple(v.shape) for k, v in y.items()
    }


def declare(axes: Mapping[str, Sequence[str | None]], x: Params, y: Params) -> Channels:
    """Name the dimensions by hand: equal labels are cut together, None is kept whole.

    `declare({"x.w": ("hidden", None), "y.v": (None, "hidden")}, x, y)` couples the rows of x.w with
    the columns of y.v.
    """
    shapes = shapes_of(x, y)
    units: dict[str, int] = {}
    for name, labels in axes.items():
        if name not in shapes:
            raise ValueError(
                f"axes must name parameters of x or y, got {name!r}; known: {', '.join(shapes)}"
            )
        if isinstance(labels, str):
            raise ValueError(f"axes of {name} must be a list of labels, got the text {labels!r}")
        if len(labels) != len(shapes[name]):
            raise ValueError(
                f"axes of {name} must have {len(shapes[name])} labels, got {tuple(labels)}"
            )
        for label, size in zip(labels, shapes[name], strict=True):
            if label is not None and units.setdefault(label, size) != size:
                raise ValueError(
                    f"dimensions labelled {label!r} must have one size, got {units[label]} and "
                    f"{size} in {name}"
                )
    offsets = dict(zip(units, accumulate(units.values(), initial=0), strict=False))
    numbered = {
        name: {
            dim: torch.arange(offsets[label], offsets[label] + units[label])
            for dim, label in enumerate(labels)
            if label is not None
        }
        for name, labels in axes.items()
    }
    return Channels(units, {name: dims for name, dims in numbered.items() if dims}, shapes)


def join(parts: Sequence[Channels], shapes: Mapping[str, tuple[int, ...]]) -> Channels:
    """Put the groups of several modules side by side."""
    units: dict[str, int] = {}
    axes: dict[str, Mapping[int, Tensor]] = {}
    whole: dict[str, str] = {}
    for part in parts:
        start = sum(units.values())
        for name, dims in part.axes.items():
            axes[name] = {d: torch.where(u == ALWAYS, u, u + start) for d, u in dims.items()}
        units |= part.units
        whole |= part.whole
    return Channels(units, axes, shapes, whole)
