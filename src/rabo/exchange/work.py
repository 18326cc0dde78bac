"""Work of a client, declared in both directions, and how a client performs it."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from types import MappingProxyType
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from rabo.errors import DIVERGENCE_REMEDY, ClientError, NonFiniteError
from rabo.exchange.budgets import Absent
from rabo.exchange.client import ClientContext
from rabo.exchange.cost import Meter
from rabo.exchange.request import Answer, Reply, Request
from rabo.seeding import seed_of, seeded_layers
from rabo.tree import Params, is_finite, leaves, num_bytes, shapes, squared_norm

Levels: TypeAlias = Mapping[str, Literal["x", "y"]]  # array name -> shaped like x or like y


def levels(**names: Literal["x", "y"]) -> Levels:
    """Declare for each array whether it is shaped like x or like y."""
    return MappingProxyType(names)


class Work(ABC):
    """One kind of request, as a client carries it out: a frozen dataclass of static choices.

    A work declares the arrays it takes, and the arrays and numbers it answers with. Anything
    undeclared is refused. Step sizes and other values come with the request.
    """

    name: str  # unique within an algorithm; part of seeds, costs and records
    takes: Levels  # arrays of a request, all of them or some
    answers: Levels  # arrays of the answer
    numbers: tuple[str, ...] = ()  # scalars of the answer
    separable: bool = False  # treats copies of y independently: equal clients may be stacked

    @abstractmethod
    def __call__(self, request: Request, client: ClientContext) -> Answer:
        """Carry out a request on the client."""


Works: TypeAlias = Mapping[str, Work]


def named(*works: Work) -> dict[str, Work]:
    """Index works by their names."""
    return {work.name: work for work in works}


class Runtime(Protocol):
    """Where clients run. A client that dropped out has no reply, or one that says why."""

    def map(self, work: Work, requests: Iterable[Request]) -> Iterator[Reply]:
        """Send requests, in ascending order of clients; yield replies in that order."""
        ...


@runtime_checkable
class RollCall(Protocol):
    """A runtime whose clients say themselves how wide a submodel they can train."""

    def widths(self, round: int, clients: Sequence[int]) -> Mapping[int, float | Absent]:
        """Ask clients; one that cannot take part is absent."""
        ...


def perform(work: Work, request: Request, client: ClientContext, meter: Meter) -> Reply:
    """Run one piece of work as a client does: seeded, metered, and checked before it travels.

    An exception becomes the fault of the reply.
    """
    shape = (client.problem.shape_key, request.submodel.widths, shapes(request.arrays))
    key = (work, *shape, request.steps)
    held = 0
    if not meter.knows(key):
        context = (request.arrays, client.memory, client.cache, client.batches)
        held = sum(map(num_bytes, context))
    seed = seed_of(request.seed, request.round, client.client, work.name)
    start = time.perf_counter()
    try:
        with seeded_layers(seed, leaves(request.arrays)):
            answer, cost = meter.run(key, lambda: work(request, client), held)
        if any(answer.arrays.values()) and not _is_surely_finite(answer.arrays):
            raise not_finite(work)
    except Exception as error:
        return failed(request, work, error)
    # the check has waited for the device, so this is what the work took
    cost = cost._replace(seconds=time.perf_counter() - start)
    scalars = {key: float(value) for key, value in answer.scalars.items()}
    return Reply(request.client, answer.arrays, scalars, cost, rows=answer.rows)


def _is_surely_finite(arrays: Mapping[str, Params]) -> bool:
    """Check that all entries are finite. A finite norm proves it faster."""
    return isfinite(squared_norm(arrays).item()) or is_finite(arrays)


def not_finite(work: Work) -> NonFiniteError:
    """Return the error for an answer with NaN or infinite values."""
    return NonFiniteError(
        f"{work.name} gave NaN or infinite values: the run diverges. {DIVERGENCE_REMEDY}"
    )


def failed(request: Request, work: Work, error: Exception) -> Reply:
    """Return the reply of a client at which work has failed."""
    fault = ClientError(request.client, request.round, work.name, error)
    fault.__cause__ = error
    return Reply(request.client, {}, fault=fault)
