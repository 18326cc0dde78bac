"""The problems of several clients, on one batch each, at one x and y."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor

from rabo.exchange.state import spread
from rabo.federation.clients import Client
from rabo.hypergradients.linearisation import (
    Difference,
    Exact,
    Linearisation,
    View,
    one_realisation,
)
from rabo.problems.bilevel import Batch, BilevelProblem
from rabo.seeding import stream
from rabo.tree import Params, as_tree, flatten, leaves, map_leaves

LARGEST_DATA = 2**24  # entries of a client's data; of more, a batch is drawn


class _Mean:
    """The mean of several clients' losses; a `View` reads it like the problem of one client."""

    copies = 1

    def __init__(self, problems: Sequence[BilevelProblem]):
        self.problems = problems
        self._seed = torch.default_generator.initial_seed()

    def features(self, x: Params, part: Sequence[Any]) -> list[Any]:
        found = []
        for problem, own in zip(self.problems, part, strict=True):
            with one_realisation(problem, self._seed, x):
                found.append(problem.features(x, own))
        return found

    def inner(self, z: Sequence[Any], y: Params, part: Sequence[Any]) -> Tensor:
        return self._mean("inner", z, y, part)

    def outer(self, z: Sequence[Any], y: Params, part: Sequence[Any]) -> Tensor:
        return self._mean("outer", z, y, part)

    def _mean(
        self, level: Literal["inner", "outer"], z: Sequence[Any], y: Params, part: Sequence[Any]
    ) -> Tensor:
        losses = []
        for problem, features, own in zip(self.problems, z, part, strict=True):
            with one_realisation(problem, self._seed, y):
                losses.append(getattr(problem, level)(features, y, own))
        return torch.stack(losses).mean()


def _whole(problem: BilevelProblem) -> Batch | None:
    """Return all data of a problem if they are known and not too large."""
    whole = getattr(problem, "whole", None)
    size = sum(t.numel() for t in leaves(whole)) if whole is not None else 0
    return whole if size <= LARGEST_DATA else None


@dataclass(frozen=True, eq=False)
class Point:
    """Problems, their batches, and where their losses are evaluated."""

    problems: tuple[BilevelProblem, ...]
    batches: tuple[Batch, ...]
    x: Params
    y: Params  # with a leading dimension over its copies, if there are several

    @classmethod
    def of(cls, clients: Sequence[Client], number: int, seed: int) -> "Point":
        """Take the data of the first clients, or a batch of each, at the start of the first one."""
        problems = tuple(clients[i].problem for i in range(number))
        batches = tuple(
            _whole(p) or p.batch(stream(seed, "check", i)) for i, p in enumerate(problems)
        )
        x, y = problems[0].start()
        return cls(problems, batches, x, spread(y, problems[0].copies))

    def __len__(self) -> int:
        return len(self.problems)

    @property
    def copies(self) -> int:
        return self.problems[0].copies

    @property
    def problem(self) -> BilevelProblem:
        """The mean of the problems."""
        if len(self) == 1:
            return self.problems[0]
        return cast(BilevelProblem, _Mean(self.problems))  # as far as estimators read it

    @property
    def batch(self) -> Batch:
        if len(self) == 1:
            return self.batches[0]
        return Batch([b.inner for b in self.batches], [b.outer for b in self.batches])

    @property
    def flat_x(self) -> Tensor:
        return flatten([t.detach() for t in leaves(self.x)])[0]

    @property
    def flat_y(self) -> Tensor:
        return flatten([t.detach() for t in leaves(self.y)], self.copies)

    @property
    def dtype(self) -> torch.dtype:
        return self.flat_y.dtype

    def view(self) -> View:
        return View(self.problem, self.x, self.y, self.batch)

    def system(self, second_order: bool) -> Linearisation:
        """Linearise the mean problem with exact products, or with differences of gradients."""
        return Exact(self.view()) if second_order else Difference(self.view())

    def each(self) -> list["Point"]:
        """Return one point per client."""
        pairs = zip(self.problems, self.batches, strict=True)
        return [replace(self, problems=(p,), batches=(b,)) for p, b in pairs]

    def first(self) -> "Point":
        return self.each()[0]

    def at_x(self, flat: Tensor) -> "Point":
        return replace(self, x=as_tree(flat[None], self.x))

    def at_y(self, flat: Tensor) -> "Point":
        return replace(self, y=as_tree(flat, self.y))

    def to(self, dtype: torch.dtype) -> "Point":
        """Cast x, y and the data."""

        def cast_leaf(t: Tensor) -> Tensor:
            return t.to(dtype) if t.is_floating_point() else t

        x, y, batches = (map_leaves(cast_leaf, tree) for tree in (self.x, self.y, self.batches))
        return replace(self, x=x, y=y, batches=batches)
