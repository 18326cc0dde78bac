"""Which entries how many clients hold, and the mean over the clients that held an entry."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, reduce
from typing import TypeGuard

import torch
from torch import Tensor

from rabo.submodel import Part, Submodel
from rabo.tree import Params, squared_norm, unflatten

MOST_PARTS = 16  # that are remembered before they are counted
MOST_POSITIONS = 8  # index vectors of parts that are kept at a time


class Holders:
    """Who held which entries: a count per entry, whatever the number of clients.

    Parts are remembered while they are few (clients of equal width often share one) and then added
    to the count, so that memory does not grow with the number of clients.
    """

    def __init__(self, on_parts: Callable[[Sequence[Part]], None] | None = None):
        self._times: Counter[Part] = Counter()
        self._count: dict[str, Tensor] = {}
        self._on_parts = on_parts

    def add(self, part: Part) -> None:
        self._times[part] += 1
        if len(self._times) > MOST_PARTS:
            self._fold()

    def count(self) -> dict[str, Tensor]:
        """Return how many clients hold each entry (C^k), broadcastable to the full tensors."""
        self._fold()
        return self._count

    def _fold(self) -> None:
        if self._on_parts and self._times:
            self._on_parts(list(self._times))
        for name, new in _count_holders(self._times).items():
            self._count[name] = self._count[name] + new if name in self._count else new
        self._times.clear()


def _count_holders(times: Mapping[Part, int]) -> dict[str, Tensor]:
    parts = list(times)
    if _share_channels(parts):
        held = _held_rows(parts)
        device = parts[0].device
        numbers = torch.tensor(list(times.values()), dtype=torch.float64).to(device)
        return {name: _count(rows, len(shape), numbers) for name, shape, rows in held}
    count: dict[str, Tensor] = {}
    for part, number in times.items():
        for name, held in part.held().items():
            count[name] = count[name] + number * held if name in count else number * held
    return count


def kept_fractions(parts: Sequence[Part], full: Params) -> list[float]:
    """Return ‖θ⊙m‖²/‖θ‖² of every part, with one read of the device."""
    whole = squared_norm(full).double()
    if _share_channels(parts):
        held = _held_rows(parts)
        total = sum(_energy(full[name].detach(), rows, len(parts)) for name, _, rows in held)
    else:
        total = torch.stack([squared_norm(part.extract(full)).double() for part in parts])
    return (total / whole.clamp(min=torch.finfo(whole.dtype).tiny)).tolist()  # pyright: ignore


def _share_channels(parts: Sequence[Part]) -> TypeGuard[Sequence[Submodel]]:
    """Say whether parts are cut along the same channels, so that they can be treated together."""
    axes = getattr(parts[0], "axes", None) if parts else None
    return axes is not None and all(getattr(part, "axes", None) is axes for part in parts)


def _held_rows(
    parts: Sequence[Submodel],
) -> Iterator[tuple[str, tuple[int, ...], dict[int, Tensor]]]:
    """Yield, for every tensor and cut dimension, a row per part: 1 where a position is held."""
    axes, device = parts[0].axes, parts[0].device
    kept = torch.stack([part.kept for part in parts]).double().to(device)
    for name, shape in parts[0].shapes.items():
        yield name, shape, {d: kept[:, u.to(device)] for d, u in axes.get(name, {}).items()}


def _count(rows: Mapping[int, Tensor], rank: int, numbers: Tensor) -> Tensor:
    """Return Σ_p numbers_p Π_d rows_d[p], of size one in dimensions that are not cut."""
    letters = [chr(ord("a") + d) for d in rows]
    terms = ",".join(["z", *("z" + letter for letter in letters)])
    found = torch.einsum(f"{terms}->{''.join(letters)}", numbers, *rows.values())
    return found.reshape([rows[d].shape[1] if d in rows else 1 for d in range(rank)])


def _energy(value: Tensor, rows: Mapping[int, Tensor], num_parts: int) -> Tensor:
    """Return the sum of squares that every part holds of one tensor."""
    loose = [d for d in range(value.dim()) if d not in rows]
    squares = value.square().sum(loose).double() if loose else value.square().double()
    if not rows:
        return squares.expand(num_parts)
    letters = [chr(ord("a") + d) for d in sorted(rows)]
    first, *others = (rows[d] for d in sorted(rows))
    terms = ",".join([f"z{letters[0]}", "".join(letters), *("z" + n for n in letters[1:])])
    return torch.einsum(f"{terms}->z", first, squares, *others)


class Covered(ABC):
    """One value for every entry from the clients that hold it, and how many they are."""

    def __init__(self) -> None:
        self.holders = Holders()

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
        return self.holders.count()

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
        self._like, self._names = like, list(like)
        first = next(iter(like.values()), torch.zeros(0))
        dtype = reduce(torch.promote_types, {v.dtype for v in like.values()}, first.dtype)
        self._flat = first.new_zeros(sum(v.numel() for v in like.values()), dtype=dtype)
        self._positions: dict[Part, Tensor | None] = {}  # of the parts met last

    def add(self, part: Part, values: Params) -> None:
        self._names = part.names
        positions, flat = self._positions_of(part), part.flatten(values).to(self._flat.dtype)
        if positions is None:
            self._flat.add_(flat)
        else:
            self._flat.index_add_(0, positions, flat)
        self.holders.add(part)

    def mean(self) -> dict[str, Tensor]:
        return {
            name: total / self.count[name].clamp(min=1).to(total.dtype)
            if name in self.count
            else total
            for name, total in self.sum().items()
        }

    def sum(self) -> dict[str, Tensor]:
        sums = unflatten(self._flat[None], [self._like[name] for name in self._names])
        by_name = dict(zip(self._names, sums, strict=True))
        return {name: by_name[name] for name in self._like}

    def _positions_of(self, part: Part) -> Tensor | None:
        if part not in self._positions:
            if len(self._positions) >= MOST_POSITIONS:
                del self._positions[next(iter(self._positions))]
            self._positions[part] = part.positions()
        return self._positions[part]
