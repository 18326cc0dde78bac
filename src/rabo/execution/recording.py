"""A client whose tensors stay at the same addresses, and its work recorded on them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import log2
from typing import Any, TypeAlias

import torch
from torch import Generator, Tensor

from rabo.exchange.cost import Cost
from rabo.exchange.work import Local, Reply, Task, Work, batch_stream
from rabo.execution.players import GraphPlayer, Rerun, as_block, copy_tree
from rabo.execution.room import Room
from rabo.problems.bilevel import Batch, BilevelProblem, Level
from rabo.tree import lay, leaves, map_leaves, only_tensors, shapes

Purposes: TypeAlias = Sequence[str | int]  # what batches are drawn for


def key_of(work: Work, task: Task) -> Any:
    return work.__name__, task.num_steps, tuple(task.arrays), tuple(task.scalars)


class Most(dict[str, int]):
    """The largest number of multiply-adds that a client has spent on work of a name."""

    def see(self, work: Work, cost: Cost) -> None:
        self[work.__name__] = max(self.get(work.__name__, 1), cost.multiply_adds)

    def priority(self, work: Work, cost: Cost) -> int:
        """Return how urgent a client's kernels are: one level for each halving of its width.

        Small kernels would otherwise wait, one after the other, for the large ones of others.
        """
        return -int(log2(self[work.__name__] / max(1, cost.multiply_adds)) / 2 + 0.5)


@dataclass
class _Batches:
    """A static batch, and the round whose data it holds."""

    batch: Batch
    constant: bool
    round: int


@dataclass
class StaticLocal(Local):
    """A client whose batches and memory stay at the same addresses from round to round."""

    drawn: dict[str | int, _Batches] = field(default_factory=dict)
    costs: dict[Any, Cost] = field(default_factory=dict)  # of work that was measured
    recordings: dict[Any, "Recording | None"] = field(default_factory=dict)  # None: not possible
    used: dict[str | int, None] = field(default_factory=dict)  # purposes that work drew for
    has_drawn_itself: bool = False  # numbers that a recording would repeat
    is_loaded: bool = False  # this round's data are in their places
    has_changing_batches: bool = False  # whose shapes a recording cannot follow

    def draw(self, task: Task, purpose: str | int) -> Batch:
        purpose = purpose if self.problem.redraw == "step" else "round"
        self.used[purpose] = None
        if self.is_loaded:
            return self.drawn[purpose].batch
        with _reading_allowed():
            if purpose not in self.drawn:
                [new] = self.fresh(task, [purpose])
                constant = new is getattr(self.problem, "data", None)
                own = new if constant else map_leaves(torch.clone, new)
                self.drawn[purpose] = _Batches(own, constant, task.round)
            if not self.refresh(task, [purpose]):
                return self.fresh(task, [purpose])[0]
        return self.drawn[purpose].batch

    def draw_level(self, task: Task, purpose: str | int, level: Level) -> Batch:
        return self.draw(task, purpose)

    def answer(self, reply: Reply) -> Reply:
        """Return what a client answers, given what its work returns."""
        return reply

    def stream(self, task: Task, purpose: str | int) -> Generator:
        self.has_drawn_itself = True
        return super().stream(task, purpose)

    def refresh(self, task: Task, purposes: Purposes) -> bool:
        """Fill static batches with this round's data; say whether they have the shapes for that."""
        stale = [p for p in purposes if self.drawn[p].round != task.round]
        changing = [p for p in stale if not self.drawn[p].constant]
        new = self.fresh(task, changing) if changing else []
        here = [self.drawn[p].batch for p in changing]
        if shapes(new) != shapes(here):
            self.has_changing_batches = True
            return False
        copy_tree(here, new)
        for purpose in stale:
            self.drawn[purpose].round = task.round
        return True

    def recording(self, work: Work, task: Task, most: Most, room: Room) -> "Recording | None":
        """Return a recording of work that has been measured, made now if there is none."""
        key = key_of(work, task)
        if key not in self.costs or self.has_changing_batches or not only_tensors(self.memory):
            return None
        # memory that other work left must be what it was when this was recorded
        whole = (key, id(getattr(work, "__self__", None)), *sorted(map(id, self.memory.values())))
        if whole not in self.recordings:
            priority = most.priority(work, self.costs[key])
            self.recordings[whole] = _record(work, task, self, self.costs[key], priority, room)
        return self.recordings[whole]

    def fresh(self, task: Task, purposes: Purposes) -> list[Batch]:
        """Draw anew, for all purposes at once where the problem can."""
        return draw_all(self.problem, task, self.client, purposes)


def draw_all(problem: BilevelProblem, task: Task, client: int, purposes: Purposes) -> list[Batch]:
    """Draw for all purposes at once where a problem has `batches`, else one by one."""
    streams = [batch_stream(task, client, purpose) for purpose in purposes]
    batches = getattr(problem, "batches", None)
    return batches(streams) if batches else [problem.batch(s) for s in streams]


@dataclass
class Recording:
    """One piece of work of one client on tensors that stay where they are."""

    local: StaticLocal
    task: Task  # static tensors
    purposes: list[str | int]
    reply: Reply
    summary: Tensor  # the norm of the reply, then its scalars
    memory: Mapping[str, Any]  # what the work leaves behind
    before: Mapping[str, Any]  # what it found, kept alive
    player: "GraphPlayer | Rerun"
    cost: Cost

    def start(self, task: Task) -> "Recording | None":
        """Load this round's inputs and let it run; None if they have other shapes."""
        if not self.local.refresh(task, self.purposes):
            return None
        for name, params in task.arrays.items():
            copy_tree(self.task.arrays[name], params)
        for name, value in self.task.scalars.items():
            value.fill_(task.scalars[name])  # type: ignore[attr-defined]
        self.local.is_loaded = True
        try:
            self.player.replay()
        finally:
            self.local.is_loaded = False
        self.local.memory.update(self.memory)
        return self


def _record(
    work: Work, task: Task, local: StaticLocal, cost: Cost, priority: int, room: Room
) -> Recording | None:
    """Record work, or return None if it cannot be."""
    device = leaves((task.arrays, local.memory))[0].device
    static = task._replace(
        arrays={name: as_block(params) for name, params in task.arrays.items()},
        scalars={
            name: torch.tensor(value, dtype=torch.float64, device=device)
            for name, value in task.scalars.items()
        },
    )
    before = dict(local.memory)

    def run() -> tuple[Reply, Tensor | None, dict[str, Any]]:
        local.memory, local.used, local.has_drawn_itself = dict(before), {}, False
        reply = local.answer(work(static, local))
        arrays = {name: as_block(params) for name, params in reply.arrays.items()}
        reply = reply._replace(arrays=arrays)
        return reply, _summary(reply), local.memory

    shared = room.pool(device, cost.peak_memory_bytes)
    player = GraphPlayer(priority, shared) if device.type == "cuda" else Rerun()
    found = player.record(run)
    local.memory, purposes = before, list(local.used)
    batches = [local.drawn[p].batch for p in purposes]
    if found is None or local.has_drawn_itself or not only_tensors((found[2], batches)):
        return None
    reply, summary, after = found
    if summary is None:
        return None
    room.take(shared, cost.peak_memory_bytes)
    return Recording(local, static, purposes, reply, summary, after, before, player, cost)


def _summary(reply: Reply) -> Tensor | None:
    """Return what is read of a reply; None where work has read the device itself."""
    values = list(reply.scalars.values())
    if not all(isinstance(v, Tensor) for v in values):
        return None
    vectors = [lay(leaves(params)) for params in reply.arrays.values() if params]
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
