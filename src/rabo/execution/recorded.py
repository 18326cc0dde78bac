"""All clients in this process, their work recorded once and replayed: fast on a GPU."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import isfinite
from typing import Any, NamedTuple

import torch

from rabo.exchange.cost import Cost, Meter
from rabo.exchange.work import Local, Reply, Task, Work, failed, not_finite, perform
from rabo.execution.recording import Most, Recording, StaticLocal, key_of
from rabo.execution.room import Room
from rabo.problems.bilevel import BilevelProblem
from rabo.pruning.submodel import Cut

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
        self._now: dict[tuple[int, ...], Local] = {}  # of the round under way
        self._kept: dict[Any, StaticLocal] = {}  # by client and widths
        self._seen: dict[Any, int] = {}  # the round in which a client first had these widths
        self._most, self._room = Most(), Room()
        self._alone: dict[Any, Cost] = {}  # of a client, alone where it has been

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
                recording = local.recording(work, task, self._most, self._room)
                started = recording and recording.start(task)
                if started:
                    return _Started(clients, task, started.reply, started)
            except Exception as error:
                return _Started(clients, task, failed(clients[0], task.round, work.__name__, error))
        reply = perform(work, task, local, self._meter)
        if reply.fault is None:
            if isinstance(local, StaticLocal):
                reply = local.answer(reply)
                local.costs[key_of(work, task)] = reply.cost
                self._most.see(work, reply.cost)
            kind = self._kind_of(work, clients[0], task)
            if len(clients) == 1:
                self._alone[kind] = reply.cost
            self._alone.setdefault(kind, _share(reply.cost, len(clients)))
        return _Started(clients, task, reply)

    def _cost_of_one(self, work: Work, started: "_Started", cost: Cost) -> Cost:
        """Return what one of some clients that work together has spent when it was alone.

        Work that none has done alone yet, because it begins later, is shared: its peak of memory is
        then a little low, by what all hold in common.
        """
        number = len(started.clients)
        if number == 1:
            return cost
        kind = self._kind_of(work, started.clients[0], started.task)
        alone = self._alone.get(kind, _share(cost, number))
        return alone._replace(seconds=cost.seconds / number)

    def _kind_of(self, work: Work, client: int, task: Task) -> Any:
        """Return what two pieces of work have in common that cost the same."""
        return key_of(work, task), task.cut.widths, self.problems[client].shape_key

    def _local(self, clients: tuple[int, ...], task: Task) -> Local:
        if task.round != self._round:
            self._round, self._now = task.round, {}
        if task.exchange > 0 and clients in self._now:
            return self._now[clients]
        local = self._kept_local(clients, task) or Local(
            clients[0], self.problems[clients[0]].restrict(task.cut)
        )
        self._now[clients] = local
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


def _share(cost: Cost, number: int) -> Cost:
    return cost._replace(
        multiply_adds=cost.multiply_adds // number,
        peak_memory_bytes=cost.peak_memory_bytes // number,
    )


class _Started(NamedTuple):
    """A reply that is there, or will be when the device has come so far; the same of all clients
    that work together.
    """

    clients: tuple[int, ...]
    task: Task
    reply: Reply
    recording: "Recording | None" = None


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
    recording: "Recording",
    size: float,
    values: list[float],
) -> Reply:
    if not isfinite(size):
        return failed(clients[0], task.round, work.__name__, not_finite(work.__name__))
    scalars = dict(zip(recording.reply.scalars, values, strict=True))
    cost = recording.cost._replace(seconds=recording.player.seconds())
    return recording.reply._replace(scalars=scalars, cost=cost, norm=size)
