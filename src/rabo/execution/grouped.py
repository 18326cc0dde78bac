"""Recorded work, of clients that hold the same submodel as one: fewer and larger kernels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor

from rabo.exchange.request import Request
from rabo.exchange.work import Work
from rabo.execution.recorded import Recorded
from rabo.execution.recording import Purposes, StaticClient, draw_all
from rabo.execution.room import Room, evenly, most_together
from rabo.problems.bilevel import Batch, BilevelProblem
from rabo.problems.problem import ClientProblem
from rabo.pruning.submodel import Cut
from rabo.tree import Params, leaves, map_leaves, replace_leaves


class Grouped(Recorded):
    """Like `Recorded`, but clients that get the same tensors are asked as one, and answer as one.

    Where every task has a y of its own, clients of one submodel differ in nothing but their tasks:
    these lie side by side in one batch, and each client answers with the mean of the group. The sum
    over clients is the same up to rounding; what only one of them has answered is not known, so it
    is not for runs that clip, trim or judge single answers. Only `separable` work is grouped: it
    treats copies of y one by one, and starts all of them from the same arrays.
    """

    gives_means = True

    def __init__(self, problems: Mapping[int, BilevelProblem]):
        super().__init__(problems)
        self._fitted_in = -1  # the round of which this is true
        self._most_together: dict[Any, int] = {}  # by widths and shapes
        self._before: dict[Any, int] = {}  # in an earlier round

    def _groups(
        self, work: Work, asked: Sequence[Request]
    ) -> list[tuple[tuple[int, ...], Request]]:
        if not work.separable:
            return super()._groups(work, asked)
        alike: dict[Any, list[Request]] = {}
        for request in asked:
            alike.setdefault(self._what_it_gets(request), []).append(request)
        return [
            (group, next(r for r in requests if r.client == group[0]))
            for requests in alike.values()
            for group in self._fitting([r.client for r in requests], requests[0])
        ]

    def _fitting(self, clients: Sequence[int], request: Request) -> list[tuple[int, ...]]:
        """Return clients in groups that fit into a device's memory, the same for a whole round."""
        if request.round != self._fitted_in:
            self._before, self._most_together = self._most_together, {}
            self._fitted_in = request.round
        kind = (request.submodel.widths, self.problems[clients[0]].shape_key)
        if kind not in self._most_together:
            spent = [c.peak_memory_bytes for k, c in self._alone.items() if k[1:] == kind]
            device = leaves(request.arrays)[0].device
            most = self._most_together[kind] = most_together(device, max(spent)) if spent else 1
            if most < self._before.get(kind, most):  # work that began later needs more
                self._kept = {k: kept for k, kept in self._kept.items() if len(k[0]) == 1}
                self._room = Room()
        size = evenly(len(clients), self._most_together[kind])
        return [tuple(clients[i : i + size]) for i in range(0, len(clients), size)]

    def _what_it_gets(self, request: Request) -> Any:
        """Return what is equal for clients that can work together."""
        problem = self.problems[request.client]
        is_ready = self._has_been_seen(request.client, request)
        if not is_ready or not isinstance(problem, ClientProblem) or problem.copies == 1:
            return request.client
        arrays = tuple(map(id, request.arrays.values()))  # clients that share a part get one
        numbers = tuple(request.scalars.items()), request.steps, request.exchange
        return id(request.submodel), arrays, numbers, problem.shape_key

    def _static(self, clients: tuple[int, ...], cut: Cut) -> StaticClient:
        if len(clients) == 1:
            return super()._static(clients, cut)
        problems: Any = [self.problems[client].restrict(cut) for client in clients]
        together: Any = Together(problems)
        return _GroupClient(clients[0], together, clients=clients)


class Together:
    """The problems of clients of one submodel as one: all their copies of y, the sum of losses.

    Departs from a single client's problem, whose losses are means over its copies, so that every
    copy sees the gradients it has there.
    """

    def __init__(self, problems: Sequence[ClientProblem]):
        self.problems, self.number = problems, len(problems)
        first = problems[0]
        self._whole = first.with_copies(self.number * first.copies)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def with_one_copy_each(self) -> "Together":
        return Together([problem.with_one_copy_each() for problem in self.problems])

    @property
    def shape_key(self) -> Any:
        return self.number, self.problems[0].shape_key

    def inner(self, z: Any, y: Params, part: Any) -> Tensor:
        return self.number * self._whole.inner(z, y, part)

    def outer(self, z: Any, y: Params, part: Any) -> Tensor:
        return self.number * self._whole.outer(z, y, part)


@dataclass
class _GroupClient(StaticClient):
    """What clients that work together have at hand."""

    clients: tuple[int, ...] = field(default=(), kw_only=True)

    def fresh(self, request: Request, purposes: Purposes) -> list[Batch]:
        together: Any = self.problem
        drawn = [
            draw_all(problem, request, client, purposes)
            for client, problem in zip(self.clients, together.problems, strict=True)
        ]
        return [_side_by_side(batches) for batches in zip(*drawn, strict=True)]

    def stream(self, request: Request, purpose: str | int) -> Generator:
        raise RuntimeError(
            "clients that work together have no random numbers of their own; use the runtime "
            "recorded"
        )

    def answer(self, work: Work, arrays: Mapping[str, Params]) -> Mapping[str, Params]:
        """Divide arrays shaped like x, which are sums over clients; all others are means."""
        n = len(self.clients)
        return {
            name: map_leaves(lambda t: t / n, params) if work.answers[name] == "x" else params
            for name, params in arrays.items()
        }


def _side_by_side(batches: Sequence[Batch]) -> Batch:
    tensors = [torch.cat(each) for each in zip(*map(leaves, batches), strict=True)]
    return replace_leaves(batches[0], tensors)
