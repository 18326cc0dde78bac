"""All clients in this process, their work recorded once and replayed: fast on a GPU."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from math import isfinite, log2
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from rabo.metering import Cost, Meter
from rabo.problem import Batch, BilevelProblem
from rabo.runtimes.base import Local, Reply, Task, Work, batch_stream, failed, not_finite, perform
from rabo.runtimes.players import GraphPlayer, Rerun, as_block, copy_tree
from rabo.submodel import Cut
from rabo.tree import lay, leaves, map_leaves, only_tensors, shapes

SIDE_BY_SIDE = 16  # clients that run at the same time, each on a stream of its own
NEVER = sys.maxsize  # a round that does not come


class Recorded:
    """Like `InProcess`, but a client's work is recorded the second time it is asked for.

    On a GPU a recording is a CUDA graph: a round then costs its kernels, not their launches, and
    clients run side by side. It needs work whose kernels depend on nothing but tensors: work that
    reads the device, random layers, and problems that see which channels were cut (not only how
    many) run as in `InProcess`. The tensors of a reply last until the client's next piece of work.
    """

    def __init__(self, problems: Mapping[int, BilevelProblem]):
        self.problems = problems
        self._meter = Meter()
        self._round = -1
        self._now: dict[tuple[int, ...], tuple[Cut, Local]] = {}  # of the round under way
        self._kept: dict[Any, StaticLocal] = {}  # by client and widths
        self._seen: dict[Any, int] = {}  # the round in which a client first had these widths
        self._most = _Most()
        self._alone: dict[Any, Cost] = {}  # of work that a client did alone

    def map(self, work: Work, tasks: Iterable[tuple[int, Task]]) -> Iterator[tuple[int, Reply]]:
        remaining = iter(tasks)
        while asked := list(islice(remaining, SIDE_BY_SIDE)):
            groups = self._groups(work, asked)
            started = [self._start(work, *group) for group in groups]
            replies: dict[int, Reply] = {}
            for each, reply in zip(started, _finish(work, started), strict=True):
                cost = self._cost_of_one(work, each, reply.cost)
                replies |= dict.fromkeys(each.clients, reply._replace(cost=cost))
            for client, _ in asked:
                yield client, replies[client]

    def _groups(
        self, work: Work, asked: Sequence[tuple[int, Task]]
    ) -> list[tuple[tuple[int, ...], Task]]:
        """Say who works together: everybody alone."""
        return [((client,), task) for client, task in asked]

    def _start(self, work: Work, clients: tuple[int, ...], task: Task) -> "_Started":
        local = self._local(clients, task)
        if isinstance(local, StaticLocal):
            try:
                recording = local.recording(work, task, self._most)
                started = recording and recording.start(task)
                if started:
                    return _Started(clients, task, started.reply, started)
            except Exception as error:
                return _Started(clients, task, failed(clients[0], task.round, work.__name__, error))
        reply = perform(work, task, local, self._meter)
        if reply.fault is None:
            if isinstance(local, StaticLocal):
                reply = local.answer(reply)
                local.costs[_key(work, task)] = reply.cost
                self._most.see(work, reply.cost)
            if len(clients) == 1:
                self._alone[_key(work, task), task.cut.widths, local.problem.shape_key] = reply.cost
        return _Started(clients, task, reply)

    def _cost_of_one(self, work: Work, started: "_Started", cost: Cost) -> Cost:
        """Return what one of some clients that work together has spent when it was alone.

        Work that none has done alone yet, because it begins later, is shared: its peak of memory is
        then a little low, by what all hold in common.
        """
        number = len(started.clients)
        if number == 1:
            return cost
        shape = self.problems[started.clients[0]].shape_key
        share = cost._replace(
            multiply_adds=cost.multiply_adds // number,
            peak_memory_bytes=cost.peak_memory_bytes // number,
        )
        alone = self._alone.get((_key(work, started.task), started.task.cut.widths, shape), share)
        return alone._replace(seconds=cost.seconds / number)

    def _local(self, clients: tuple[int, ...], task: Task) -> Local:
        if task.round != self._round:
            self._round, self._now = task.round, {}
        cut, now = self._now.get(clients, (None, None))
        if now is not None and (cut is task.cut or "x" not in task.arrays):
            return now
        local = self._kept_local(clients, task) or Local(
            clients[0], self.problems[clients[0]].restrict(task.cut)
        )
        self._now[clients] = (task.cut, local)
        return local

    def _kept_local(self, clients: tuple[int, ...], task: Task) -> "StaticLocal | None":
        """Return what is kept of a client, once it has had these widths in an earlier round."""
        if not self._has_been_seen(clients[0], task):
            return None
        key = (clients, task.cut.widths)
        if key not in self._kept:
            self._kept[key] = self._static(clients, task.cut)
        local = self._kept[key]
        local.memory = {}
        return local

    def _static(self, clients: tuple[int, ...], cut: Cut) -> "StaticLocal":
        return StaticLocal(clients[0], self.problems[clients[0]].restrict(cut))

    def _has_been_seen(self, client: int, task: Task) -> bool:
        """Say whether a client had these widths in an earlier round, and its work is recordable."""
        # a mask of single entries has the widths of the whole model
        key = (client, task.cut.widths, type(task.cut.x), type(task.cut.y))
        if key not in self._seen:
            problem = self.problems[client].restrict(task.cut)
            self._seen[key] = task.round if can_be_recorded(problem) else NEVER
        return self._seen[key] < task.round


def can_be_recorded(problem: BilevelProblem) -> bool:
    """Say whether what a client computes depends on the widths of its cut and on tensors alone."""
    return getattr(problem, "needs_only_widths", False) and not getattr(
        problem, "has_random_layers", False
    )


def _key(work: Work, task: Task) -> Any:
    return work.__name__, task.num_steps, tuple(task.arrays), tuple(task.scalars)


class _Most(dict[str, int]):
    """The largest number of multiply-adds that a client has spent on work of a name."""

    def see(self, work: Work, cost: Cost) -> None:
        self[work.__name__] = max(self.get(work.__name__, 1), cost.multiply_adds)

    def priority(self, work: Work, cost: Cost) -> int:
        """Return how urgent a client's kernels are: one level for each halving of its width.

        Small kernels would otherwise wait, one after the other, for the large ones of others.
        """
        return -int(log2(self[work.__name__] / max(1, cost.multiply_adds)) / 2 + 0.5)


class _Started(NamedTuple):
    """A reply that is there, or will be when the device has come so far; the same of all clients
    that work together.
    """

    clients: tuple[int, ...]
    task: Task
    reply: Reply
    recording: "_Recording | None" = None


def _finish(work: Work, started: list[_Started]) -> Iterator[Reply]:
    """Read the device once for all clients, and check what they answered."""
    waiting = [s.recording for s in started if s.recording is not None]
    for recording in waiting:
        recording.player.join()
    read = torch.cat([r.summary for r in waiting]).tolist() if waiting else []
    for clients, task, reply, recording in started:
        if recording is not None:
            number = len(recording.summary)
            (size, *values), read = read[:number], read[number:]
            reply = _reply(work, clients, task, recording, size, values)
        if reply.fault is not None and len(clients) > 1:
            reply.fault.add_note(f"It is one of the clients {clients}, which worked as one.")
        yield reply


def _reply(
    work: Work,
    clients: tuple[int, ...],
    task: Task,
    recording: "_Recording",
    size: float,
    values: list[float],
) -> Reply:
    if not isfinite(size):
        return failed(clients[0], task.round, work.__name__, not_finite(work.__name__))
    scalars = dict(zip(recording.reply.scalars, values, strict=True))
    cost = recording.cost._replace(seconds=recording.player.seconds())
    return Reply(recording.reply.arrays, scalars, cost, norm=size)


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
    recordings: dict[Any, "_Recording | None"] = field(default_factory=dict)  # None: not possible
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
                new = self.fresh(task, purpose)
                constant = new is getattr(self.problem, "data", None)
                own = new if constant else map_leaves(torch.clone, new)
                self.drawn[purpose] = _Batches(own, constant, task.round)
            if not self.refresh(task, purpose):
                return self.fresh(task, purpose)
        return self.drawn[purpose].batch

    def answer(self, reply: Reply) -> Reply:
        """Return what a client answers, given what its work returns."""
        return reply

    def stream(self, task: Task, purpose: str | int) -> Generator:
        self.has_drawn_itself = True
        return super().stream(task, purpose)

    def refresh(self, task: Task, purpose: str | int) -> bool:
        """Fill a static batch with this round's data; say whether it has the shape for that."""
        held = self.drawn[purpose]
        if held.round != task.round and not held.constant:
            new = self.fresh(task, purpose)
            if shapes(new) != shapes(held.batch):
                self.has_changing_batches = True
                return False
            copy_tree(held.batch, new)
        held.round = task.round
        return True

    def recording(self, work: Work, task: Task, most: _Most) -> "_Recording | None":
        """Return a recording of work that has been measured, made now if there is none."""
        key = _key(work, task)
        if key not in self.costs or self.has_changing_batches or not only_tensors(self.memory):
            return None
        # memory that other work left must be what it was when this was recorded
        whole = (key, id(getattr(work, "__self__", None)), *sorted(map(id, self.memory.values())))
        if whole not in self.recordings:
            priority = most.priority(work, self.costs[key])
            self.recordings[whole] = _record(work, task, self, self.costs[key], priority)
        return self.recordings[whole]

    def fresh(self, task: Task, purpose: str | int) -> Batch:
        """Draw anew."""
        return self.problem.batch(batch_stream(task, self.client, purpose))


@dataclass
class _Recording:
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

    def start(self, task: Task) -> "_Recording | None":
        """Load this round's inputs and let it run; None if they have other shapes."""
        if not all(self.local.refresh(task, purpose) for purpose in self.purposes):
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
    work: Work, task: Task, local: StaticLocal, cost: Cost, priority: int
) -> _Recording | None:
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

    player = GraphPlayer(priority) if device.type == "cuda" else Rerun()
    found = player.record(run)
    local.memory, purposes = before, list(local.used)
    batches = [local.drawn[p].batch for p in purposes]
    if found is None or local.has_drawn_itself or not only_tensors((found[2], batches)):
        return None
    reply, summary, after = found
    if summary is None:
        return None
    return _Recording(local, static, purposes, reply, summary, after, before, player, cost)


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
