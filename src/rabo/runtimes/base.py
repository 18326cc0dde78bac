"""What travels between server and clients, and what a runtime must do."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from torch import Generator

from rabo.bilevel import Batch, BilevelProblem
from rabo.errors import ClientError, NonFiniteError
from rabo.metering import Cost, Meter
from rabo.resources import Absent
from rabo.seeding import seed_of, stream
from rabo.submodel import Cut
from rabo.tree import Params, is_finite, leaves, num_bytes, shapes


class Task(NamedTuple):
    """What the server asks of one client in one exchange.

    The cut travels with the first exchange of a round; the client remembers it. Vectors whose names
    begin with x are shaped like x, all others like y.
    """

    seed: int
    round: int
    cut: Cut
    arrays: Mapping[str, Params]
    scalars: Mapping[str, float] = {}
    num_steps: int = 1  # local steps, where clients take different numbers of them


class Reply(NamedTuple):
    """What a client answers; entries named "x" and "y" train those entries of x and y.

    Work may leave numbers on the device; they are read when it is done. A client that failed
    answers with its fault alone.
    """

    arrays: Mapping[str, Params]
    scalars: Mapping[str, Any] = {}
    cost: Cost = Cost()
    fault: ClientError | None = None
    norm: float | None = None  # over all arrays, where a runtime of the server's own has taken it


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

    def stream(self, task: Task, purpose: str | int) -> Generator:
        """Return the client's own source of random numbers in this round."""
        return stream(task.seed, task.round, self.client, purpose)


def batch_stream(task: Task, client: int, purpose: str | int) -> Generator:
    return stream(task.seed, task.round, client, "batch", purpose)


Work: TypeAlias = Callable[[Task, Local], Reply]


F = TypeVar("F", bound=Callable[..., Reply])


def answers(
    *arrays: str | Callable[[Any], Iterable[str]], scalars: tuple[str, ...] = ()
) -> Callable[[F], F]:
    """Declare what a piece of work answers with: the server accepts nothing else.

    Names that depend on the algorithm's choices are a function of the algorithm.
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
    return Answer(tuple(name for each in names for name in each), scalars)


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
    held = num_bytes(task.arrays) + num_bytes(local.memory) + num_bytes(local.batches)
    whose = repr(getattr(work, "__self__", None))
    shape = (local.problem.shape_key, task.cut.widths, shapes(task.arrays))
    key = (name, whose, *shape, task.num_steps)
    devices = sorted({t.device.index for t in leaves(task.arrays) if t.device.type == "cuda"})
    start = time.perf_counter()
    try:
        with torch.random.fork_rng(devices=devices):
            _seed_layers(seed_of(task.seed, task.round, local.client, name), bool(devices))
            reply, cost = meter.run(key, lambda: work(task, local), held)
        if not all(is_finite(params) for params in reply.arrays.values() if params):
            raise not_finite(name)
    except Exception as error:
        return failed(local.client, task.round, name, error)
    # the check has waited for the device, so this is what the work took
    seconds = time.perf_counter() - start
    scalars = {key: float(value) for key, value in reply.scalars.items()}
    return reply._replace(scalars=scalars, cost=cost._replace(seconds=seconds))


def not_finite(name: str) -> NonFiniteError:
    return NonFiniteError(
        f"{name} gave NaN or infinite values; reduce the step sizes, or use beta='auto'"
    )


def failed(client: int, round: int, name: str, error: Exception) -> Reply:
    """Return the reply of a client at which work has failed."""
    fault = ClientError(client, round, name, error)
    fault.__cause__ = error
    return Reply({}, fault=fault)


def _seed_layers(seed: int, on_gpu: bool) -> None:
    """Seed what layers such as dropout draw from; torch.manual_seed is slow without a GPU."""
    torch.default_generator.manual_seed(seed)
    if on_gpu:
        torch.cuda.manual_seed_all(seed)
