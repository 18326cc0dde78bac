"""All clients in this process, their work recorded once and replayed: fast on a GPU."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import isfinite
from typing import Any, NamedTuple

import torch

from rabo.exchange.client import ClientContext
from rabo.exchange.cost import Cost, Meter
from rabo.exchange.request import Reply, Request
from rabo.exchange.work import Work, failed, not_finite, perform
from rabo.execution.recording import Most, Recording, StaticClient, key_of
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
        self._now: dict[tuple[int, ...], ClientContext] = {}  # of the round under way
        self._kept: dict[Any, StaticClient] = {}  # by client and widths
        self._seen: dict[Any, int] = {}  # the round in which a client first had these widths
        self._most, self._room = Most(), Room()
        self._alone: dict[Any, Cost] = {}  # of a client, alone where it has been

    def map(self, work: Work, requests: Iterable[Request]) -> Iterator[Reply]:
        remaining = iter(requests)
        while asked := list(islice(remaining, SIDE_BY_SIDE)):
            groups = self._groups(work, asked)
            started = [self._start(work, *group) for group in groups]
            replies: dict[int, Reply] = {}
            for each, reply in zip(started, _finish(work, started), strict=True):
                cost = self._cost_of_one(work, each, reply.cost)
                replies |= {c: replace(reply, client=c, cost=cost) for c in each.clients}
            for request in asked:
                yield replies[request.client]

    def _groups(
        self, work: Work, asked: Sequence[Request]
    ) -> list[tuple[tuple[int, ...], Request]]:
        """Say who works together: everybody alone."""
        return [((request.client,), request) for request in asked]

    def _start(self, work: Work, clients: tuple[int, ...], request: Request) -> "_Started":
        context = self._context(clients, request)
        if isinstance(context, StaticClient):
            try:
                recording = context.recording(work, request, self._most, self._room)
                started = recording and recording.start(request)
                if started:
                    return _Started(clients, request, started)
            except Exception as error:
                return _Started(clients, request, failed(request, work, error))
        reply = perform(work, request, context, self._meter)
        if reply.fault is None:
            if isinstance(context, StaticClient):
                reply = replace(reply, arrays=context.answer(work, reply.arrays))
                context.costs[key_of(work, request)] = reply.cost
                self._most.see(work, reply.cost)
            kind = self._kind_of(work, clients[0], request)
            if len(clients) == 1:
                self._alone[kind] = reply.cost
            self._alone.setdefault(kind, _share(reply.cost, len(clients)))
        return _Started(clients, request, reply)

    def _cost_of_one(self, work: Work, started: "_Started", cost: Cost) -> Cost:
        """Return what one of some clients that work together has spent when it was alone.

        Work that none has done alone yet, because it begins later, is shared: its peak of memory is
        then a little low, by what all hold in common.
        """
        number = len(started.clients)
        if number == 1:
            return cost
        kind = self._kind_of(work, started.clients[0], started.request)
        alone = self._alone.get(kind, _share(cost, number))
        return alone._replace(seconds=cost.seconds / number)

    def _kind_of(self, work: Work, client: int, request: Request) -> Any:
        """Return what two pieces of work have in common that cost the same."""
        return key_of(work, request), request.submodel.widths, self.problems[client].shape_key

    def _context(self, clients: tuple[int, ...], request: Request) -> ClientContext:
        if request.round != self._round:
            self._round, self._now = request.round, {}
        if request.exchange > 0 and clients in self._now:
            return self._now[clients]
        context = self._kept_context(clients, request) or ClientContext(
            clients[0], self.problems[clients[0]].restrict(request.submodel)
        )
        self._now[clients] = context
        return context

    def _kept_context(self, clients: tuple[int, ...], request: Request) -> "StaticClient | None":
        """Return what is kept of a client, once it has had these widths in an earlier round."""
        if not self._has_been_seen(clients[0], request):
            return None
        key = (clients, request.submodel.widths)
        if key not in self._kept:
            self._kept[key] = self._static(clients, request.submodel)
        context = self._kept[key]
        context.memory, context.cache = {}, {}
        return context

    def _static(self, clients: tuple[int, ...], cut: Cut) -> "StaticClient":
        return StaticClient(clients[0], self.problems[clients[0]].restrict(cut))

    def _has_been_seen(self, client: int, request: Request) -> bool:
        """Say whether a client had these widths in an earlier round, and its work is recordable."""
        # a mask of single entries has the widths of the whole model
        held = request.submodel
        key = (client, held.widths, type(held.x), type(held.y))
        if key not in self._seen:
            problem = self.problems[client].restrict(held)
            self._seen[key] = request.round if can_be_recorded(problem) else NEVER
        return self._seen[key] < request.round


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
    """A reply, or a recording that is running; clients that work together share it."""

    clients: tuple[int, ...]
    request: Request
    found: "Reply | Recording"


def _finish(work: Work, started: list[_Started]) -> Iterator[Reply]:
    """Read the device once for all clients, and check what they answered."""
    waiting = [s.found for s in started if isinstance(s.found, Recording)]
    for recording in waiting:
        recording.player.join()
    read = torch.cat([r.summary for r in waiting]).tolist() if waiting else []
    for clients, request, found in started:
        if isinstance(found, Recording):
            number = len(found.summary)
            (size, *values), read = read[:number], read[number:]
            reply = _reply(work, request, found, size, values)
        else:
            reply = found
        if reply.fault is not None and len(clients) > 1:
            reply.fault.add_note(f"It is one of the clients {clients}, which worked as one.")
        yield reply


def _reply(
    work: Work,
    request: Request,
    recording: "Recording",
    size: float,
    values: list[float],
) -> Reply:
    if not isfinite(size):
        return failed(request, work, not_finite(work))
    answer = recording.answer
    scalars = dict(zip(answer.scalars, values, strict=True))
    cost = recording.cost._replace(seconds=recording.player.seconds())
    return Reply(request.client, answer.arrays, scalars, cost, norm=size, rows=answer.rows)
