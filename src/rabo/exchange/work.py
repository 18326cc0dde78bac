"""What travels between server and clients, and what a runtime must do."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

from torch import Generator

from rabo.errors import DIVERGENCE_REMEDY, ClientError, NonFiniteError
from rabo.exchange.budgets import Absent
from rabo.exchange.cost import Cost, Meter
from rabo.problems.bilevel import Batch, BilevelProblem, Level
from rabo.pruning.submodel import Cut
from rabo.seeding import seed_of, seeded_layers, stream
from rabo.tree import Params, is_finite, leaves, num_bytes, shapes, squared_norm


class Task(NamedTuple):
    """What the server asks of one client in one exchange.

    `exchange` counts the client's exchanges in this round. Exchange 0 brings the cut and clears the
    client's memory; the client keeps the cut for the exchanges that follow. Vectors whose names
    begin with x are shaped like x, all others like y.
    """

    seed: int
    round: int
    cut: Cut
    arrays: Mapping[str, Params]
    scalars: Mapping[str, float] = {}
    num_steps: int = 1  # local steps, where clients take different numbers of them
    exchange: int = 0


class Reply(NamedTuple):
    """What a client answers; entries named "x" and "y" train those entries of x and y.

    Work may leave numbers on the device; they are read when it is done. A client that failed
    answers with its fault alone. `rows` names, by array and tensor, the rows that count; all rows
    of other tensors do.
    """

    arrays: Mapping[str, Params]
    scalars: Mapping[str, Any] = {}
    cost: Cost = Cost()
    fault: ClientError | None = None
    norm: float | None = None  # over all arrays, where a runtime of the server's own has taken it
    rows: Mapping[str, Mapping[str, Sequence[int]]] = {}
    full_cost: Cost | None = None  # with the full model, from clients in other processes


class Answer(NamedTuple):
    """The names of the arrays and of the numbers that a piece of work answers with."""

    arrays: tuple[str, ...]
    scalars: tuple[str, ...]


@dataclass
class Local:
    """What a client has at hand while it works, until the round ends.

    Numbers and dictionaries of tensors in its memory are there at the next exchange; what else it
    holds must be something that can be computed again, and may be gone.
    """

    client: int
    problem: BilevelProblem  # cut to the client's submodels
    memory: dict[str, Any] = field(default_factory=dict)
    batches: dict[str | int, Batch] = field(default_factory=dict)

    def draw(self, task: Task, purpose: str | int) -> Batch:
        """Draw ξ and ζ for one step, or once for the whole round where the problem says so."""
        if self.problem.redraw == "step":
            return self.problem.batch(batch_stream(task, self.client, purpose))
        if "round" not in self.batches:
            self.batches["round"] = self.problem.batch(batch_stream(task, self.client, "round"))
        return self.batches["round"]

    def draw_level(self, task: Task, purpose: str | int, level: Level) -> Batch:
        """Draw as `draw` does, for work that sees one level alone; the other may be missing."""
        batch_of = getattr(self.problem, "batch_of", None)
        if batch_of is None or self.problem.redraw == "round":
            return self.draw(task, purpose)
        return batch_of(level, partial(batch_stream, task, self.client, purpose))

    def stream(self, task: Task, purpose: str | int) -> Generator:
        """Return the client's own source of random numbers in this round."""
        return stream(task.seed, task.round, self.client, purpose)


def batch_stream(task: Task, client: int, purpose: str | int) -> Generator:
    return stream(task.seed, task.round, client, "batch", purpose)


Work: TypeAlias = Callable[[Task, Local], Reply]


F = TypeVar("F", bound=Callable[..., Reply])


def answers(
    *arrays: str | Callable[[Any], Iterable[str]],
    scalars: tuple[str, ...] | Callable[[Any], tuple[str, ...]] = (),
) -> Callable[[F], F]:
    """Declare the arrays and numbers of a reply: the server accepts nothing else.

    Pass a function of the algorithm where the names depend on its options.
    """

    def declare(work: F) -> F:
        work.answer = (arrays, scalars)  # type: ignore[attr-defined]
        return work

    return declare


def answer_of(work: Work) -> Answer:
    """Return what a piece of work has declared that it answers with."""
    if not hasattr(work, "answer"):
        raise TypeError(
            f"{work.__name__} must say what it answers with: write @answers(...) above it"
        )
    arrays, scalars = work.answer  # type: ignore[attr-defined]
    names = [[a] if isinstance(a, str) else a(work.__self__) for a in arrays]  # type: ignore[attr-defined]
    numbers: Any = scalars(work.__self__) if callable(scalars) else scalars  # type: ignore[attr-defined]
    return Answer(tuple(name for each in names for name in each), numbers)


class Runtime(Protocol):
    """Where clients run. A client that dropped out has no reply, or one that says why."""

    def map(self, work: Work, tasks: Iterable[tuple[int, Task]]) -> Iterator[tuple[int, Reply]]:
        """Let clients work on tasks that come in ascending order; yield replies in that order."""
        ...


@runtime_checkable
class RollCall(Protocol):
    """A runtime whose clients say themselves how wide a submodel they can train."""

    def widths(self, round: int, clients: Sequence[int]) -> Mapping[int, float | Absent]:
        """Ask clients; one that cannot take part is absent."""
        ...


def perform(work: Work, task: Task, local: Local, meter: Meter) -> Reply:
    """Run one piece of work as a client does: seeded, metered, and checked before it travels.

    What goes wrong is the reply.
    """
    name = work.__name__
    shape = (local.problem.shape_key, task.cut.widths, shapes(task.arrays))
    key = (name, meter.name_of(getattr(work, "__self__", None)), *shape, task.num_steps)
    held = 0
    if not meter.knows(key):
        held = sum(map(num_bytes, (task.arrays, local.memory, local.batches)))
    seed = seed_of(task.seed, task.round, local.client, name)
    start = time.perf_counter()
    try:
        with seeded_layers(seed, leaves(task.arrays)):
            reply, cost = meter.run(key, lambda: work(task, local), held)
        if any(reply.arrays.values()) and not _is_surely_finite(reply.arrays):
            raise not_finite(name)
    except Exception as error:
        return failed(local.client, task.round, name, error)
    # the check has waited for the device, so this is what the work took
    seconds = time.perf_counter() - start
    scalars = {key: float(value) for key, value in reply.scalars.items()}
    return reply._replace(scalars=scalars, cost=cost._replace(seconds=seconds))


def _is_surely_finite(arrays: Mapping[str, Params]) -> bool:
    """Check that all entries are finite. A finite norm proves it faster."""
    return isfinite(squared_norm(arrays).item()) or is_finite(arrays)


def not_finite(name: str) -> NonFiniteError:
    return NonFiniteError(
        f"{name} gave NaN or infinite values: the run diverges. {DIVERGENCE_REMEDY}"
    )


def failed(client: int, round: int, name: str, error: Exception) -> Reply:
    """Return the reply of a client at which work has failed."""
    fault = ClientError(client, round, name, error)
    fault.__cause__ = error
    return Reply({}, fault=fault)
