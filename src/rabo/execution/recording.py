"""A client whose tensors stay at the same addresses, and its work recorded on them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import log2
from typing import Any, TypeAlias

import torch
from torch import Generator, Tensor

from rabo.exchange.client import ClientContext, batch_stream
from rabo.exchange.cost import Cost
from rabo.exchange.request import Answer, Request
from rabo.exchange.work import Work
from rabo.execution.players import GraphPlayer, Rerun, as_block, copy_tree
from rabo.execution.room import Room
from rabo.problems.bilevel import Batch, BilevelProblem, Level
from rabo.tree import Params, lay, leaves, map_leaves, only_tensors, shapes

Purposes: TypeAlias = Sequence[str | int]  # what batches are drawn for
Kept: TypeAlias = tuple[dict[str, Any], dict[str, Any]]  # memory and cache


def key_of(work: Work, request: Request) -> Any:
    return work, request.steps, tuple(request.arrays), tuple(request.scalars)


class Most(dict[str, int]):
    """The largest number of multiply-adds that a client has spent on work of a name."""

    def see(self, work: Work, cost: Cost) -> None:
        self[work.name] = max(self.get(work.name, 1), cost.multiply_adds)

    def priority(self, work: Work, cost: Cost) -> int:
        """Return how urgent a client's kernels are: one level for each halving of its width.

        Small kernels would otherwise wait, one after the other, for the large ones of others.
        """
        return -int(log2(self[work.name] / max(1, cost.multiply_adds)) / 2 + 0.5)


@dataclass
class _Batches:
    """A static batch, and the round whose data it holds."""

    batch: Batch
    constant: bool
    round: int


@dataclass
class StaticClient(ClientContext):
    """A client whose batches and memory stay at the same addresses from round to round."""

    drawn: dict[str | int, _Batches] = field(default_factory=dict)
    costs: dict[Any, Cost] = field(default_factory=dict)  # of work that was measured
    recordings: dict[Any, "Recording | None"] = field(default_factory=dict)  # None: not possible
    used: dict[str | int, None] = field(default_factory=dict)  # purposes that work drew for
    has_drawn_itself: bool = False  # numbers that a recording would repeat
    is_loaded: bool = False  # this round's data are in their places
    has_changing_batches: bool = False  # whose shapes a recording cannot follow

    def draw(self, request: Request, purpose: str | int) -> Batch:
        purpose = purpose if self.problem.redraw == "step" else "round"
        self.used[purpose] = None
        if self.is_loaded:
            return self.drawn[purpose].batch
        with _reading_allowed():
            if purpose not in self.drawn:
                [new] = self.fresh(request, [purpose])
                constant = new is getattr(self.problem, "data", None)
                own = new if constant else map_leaves(torch.clone, new)
                self.drawn[purpose] = _Batches(own, constant, request.round)
            if not self.refresh(request, [purpose]):
                return self.fresh(request, [purpose])[0]
        return self.drawn[purpose].batch

    def draw_level(self, request: Request, purpose: str | int, level: Level) -> Batch:
        return self.draw(request, purpose)

    def answer(self, work: Work, arrays: Mapping[str, Params]) -> Mapping[str, Params]:
        """Return the arrays that a client answers with, given those that its work returns."""
        return arrays

    def stream(self, request: Request, purpose: str | int) -> Generator:
        self.has_drawn_itself = True
        return super().stream(request, purpose)

    def refresh(self, request: Request, purposes: Purposes) -> bool:
        """Fill static batches with this round's data; say whether they have the shapes for that."""
        stale = [p for p in purposes if self.drawn[p].round != request.round]
        changing = [p for p in stale if not self.drawn[p].constant]
        new = self.fresh(request, changing) if changing else []
        here = [self.drawn[p].batch for p in changing]
        if shapes(new) != shapes(here):
            self.has_changing_batches = True
            return False
        copy_tree(here, new)
        for purpose in stale:
            self.drawn[purpose].round = request.round
        return True

    def recording(self, work: Work, request: Request, most: Most, room: Room) -> "Recording | None":
        """Return a recording of work that has been measured, made now if there is none."""
        key = key_of(work, request)
        kept = (self.memory, self.cache)
        if key not in self.costs or self.has_changing_batches or not only_tensors(kept):
            return None
        # memory that other work left must be what it was when this was recorded
        left = [*self.memory.values(), *self.cache.values()]
        whole = (key, *sorted(map(id, left)))
        if whole not in self.recordings:
            priority = most.priority(work, self.costs[key])
            self.recordings[whole] = _record(work, request, self, self.costs[key], priority, room)
        return self.recordings[whole]

    def fresh(self, request: Request, purposes: Purposes) -> list[Batch]:
        """Draw anew, for all purposes at once where the problem can."""
        return draw_all(self.problem, request, self.client, purposes)


def draw_all(
    problem: BilevelProblem, request: Request, client: int, purposes: Purposes
) -> list[Batch]:
    """Draw for all purposes at once where a problem has `batches`, else one by one."""
    streams = [batch_stream(request, client, purpose) for purpose in purposes]
    batches = getattr(problem, "batches", None)
    return batches(streams) if batches else [problem.batch(s) for s in streams]


@dataclass
class Recording:
    """One piece of work of one client on tensors that stay where they are."""

    client: StaticClient
    request: Request  # static tensors
    purposes: list[str | int]
    answer: Answer
    summary: Tensor  # the norm of the answer, then its scalars
    after: Kept  # what the work leaves behind
    before: Kept  # what it found, kept alive
    player: "GraphPlayer | Rerun"
    cost: Cost

    def start(self, request: Request) -> "Recording | None":
        """Load this round's inputs and let it run; None if they have other shapes."""
        if not self.client.refresh(request, self.purposes):
            return None
        for name, params in request.arrays.items():
            copy_tree(self.request.arrays[name], params)
        for name, value in self.request.scalars.items():
            value.fill_(request.scalars[name])  # type: ignore[attr-defined]
        self.client.is_loaded = True
        try:
            self.player.replay()
        finally:
            self.client.is_loaded = False
        self.client.memory.update(self.after[0])
        self.client.cache.update(self.after[1])
        return self


def _record(
    work: Work, request: Request, client: StaticClient, cost: Cost, priority: int, room: Room
) -> Recording | None:
    """Record work, or return None if it cannot be."""
    before: Kept = dict(client.memory), dict(client.cache)
    device = leaves((request.arrays, *before))[0].device
    static = replace(
        request,
        arrays={name: as_block(params) for name, params in request.arrays.items()},
        scalars={
            name: torch.tensor(value, dtype=torch.float64, device=device)
            for name, value in request.scalars.items()
        },
    )

    def run() -> tuple[Answer, Tensor | None, Kept]:
        client.memory, client.cache = dict(before[0]), dict(before[1])
        client.used, client.has_drawn_itself = {}, False
        answer = work(static, client)
        arrays = client.answer(work, answer.arrays)
        arrays = {name: as_block(params) for name, params in arrays.items()}
        answer = answer._replace(arrays=arrays)
        return answer, _summary(answer), (client.memory, client.cache)

    shared = room.pool(device, cost.peak_memory_bytes)
    player = GraphPlayer(priority, shared) if device.type == "cuda" else Rerun()
    found = player.record(run)
    client.memory, client.cache = before
    purposes = list(client.used)
    batches = [client.drawn[p].batch for p in purposes]
    if found is None or client.has_drawn_itself or not only_tensors((found[2], batches)):
        return None
    answer, summary, after = found
    if summary is None:
        return None
    room.take(shared, cost.peak_memory_bytes)
    return Recording(client, static, purposes, answer, summary, after, before, player, cost)


def _summary(answer: Answer) -> Tensor | None:
    """Return what is read of an answer; None where work has read the device itself."""
    values = list(answer.scalars.values())
    if not all(isinstance(v, Tensor) for v in values):
        return None
    vectors = [lay(leaves(params)) for params in answer.arrays.values() if params]
    norms = [torch.linalg.vector_norm(v).double() for v in vectors]
    norm = torch.linalg.vector_norm(torch.stack(norms or values))  # no arrays: only scalars count
    return torch.stack([norm, *(v.detach().double().reshape(()) for v in values)])


@contextmanager
def _reading_allowed() -> Iterator[None]:
    """Let data be drawn while work that is about to be recorded must not read the device."""
    mode = torch.cuda.get_sync_debug_mode() if torch.cuda.is_available() else 0
    if mode:
        torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        if mode:
            torch.cuda.set_sync_debug_mode(mode)
