"""How far, and how, the server moves along an averaged direction."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import cos, inf, pi
from numbers import Real
from typing import Any, ClassVar, Protocol, TypeAlias

import torch

from rabo.exchange.covering import Covered
from rabo.tree import Params

KEPT = ("first", "second", "steps")  # what Adam remembers

STEP_SIZES = ("alpha", "beta", "beta_x")  # options of algorithms
StepSize: TypeAlias = float | Callable[[int], float]  # a number, or a function of the round


class OuterStep(Protocol):
    """x_{q+1} from x_q, the mean hypergradient and its own memory; uncovered entries stay."""

    default_size: ClassVar[float]  # α where the user gives none
    is_scale_free: ClassVar[bool]  # whether the length of the mean does not matter

    def __call__(
        self, full: Params, mean: Covered, size: float, memory: Mapping[str, Params]
    ) -> tuple[Params, Mapping[str, Params]]: ...


@dataclass(frozen=True)
class Descent:
    """x − α·mean, as in lines 25-33."""

    default_size: ClassVar[float] = 0.1
    is_scale_free: ClassVar[bool] = False

    def __call__(
        self, full: Params, mean: Covered, size: float, memory: Mapping[str, Params]
    ) -> tuple[Params, Mapping[str, Params]]:
        return mean.step(full, size), memory


@dataclass(frozen=True)
class Adam:
    """Adam on the server, entry by entry: an entry nobody covered keeps its moments too.

    Departs from lines 25-33, which take a plain step: the entries of x can differ in scale by
    orders of magnitude (the weights and offsets of a loss do).
    """

    default_size: ClassVar[float] = 0.01
    is_scale_free: ClassVar[bool] = True

    decay: float = 0.9
    square_decay: float = 0.999
    epsilon: float = 1e-8

    def __call__(
        self, full: Params, mean: Covered, size: float, memory: Mapping[str, Params]
    ) -> tuple[Params, Mapping[str, Params]]:
        slope, here, value = mean.flat_mean, mean.flat_count > 0, mean.lay(full)
        dtype = torch.promote_types(value.dtype, torch.float32)  # bfloat16 rounds .999 to 1
        first, second, steps = (
            mean.lay(memory[k]) if k in memory else torch.zeros_like(value, dtype=dtype)
            for k in KEPT
        )
        slope = slope.to(dtype)
        steps = steps + here
        first = torch.where(here, first.lerp(slope, 1 - self.decay), first)
        second = torch.where(here, second.lerp(slope.square(), 1 - self.square_decay), second)
        root = (second / (1 - self.square_decay**steps).clamp(min=self.epsilon)).sqrt()
        step = first / (1 - self.decay**steps).clamp(min=self.epsilon) / (root + self.epsilon)
        moved = torch.where(here, (value - size * step).to(value.dtype), value)
        kept = zip(KEPT, (first, second, steps), strict=True)
        return mean.named(moved), {name: mean.split(flat) for name, flat in kept}


@dataclass(frozen=True)
class Cosine:
    """A step size that falls from its start to zero along half a cosine."""

    start: float
    rounds: int

    def __post_init__(self) -> None:
        if not 0 < self.start < inf:
            raise ValueError(f"start must be a positive number, got {self.start}")
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {self.rounds}")

    def __call__(self, round: int) -> float:
        return self.start * (1 + cos(pi * min(round, self.rounds) / self.rounds)) / 2


def check_step(name: str, step: Any, also: str = "") -> None:
    """Refuse what is neither a positive number nor a function of the round."""
    if callable(step) and not isinstance(step, type):
        return
    if isinstance(step, Real) and not isinstance(step, bool) and 0 < float(step) < inf:
        return
    raise ValueError(
        f"{name} must be a positive number{also}, or a function of the round such as "
        f"Cosine(0.3, rounds), got {step!r}"
    )


def size_at(name: str, step: StepSize, round: int) -> float:
    """Return the step size in a round."""
    size = step(round) if callable(step) else step
    if not isinstance(size, Real):
        raise ValueError(f"{name} must be a number, got {size!r} in round {round + 1}")
    if not float(size) >= 0:
        raise ValueError(f"{name} must not be negative, got {size} in round {round + 1}")
    return float(size)


OUTER_STEPS = {"descent": Descent, "adam": Adam}
SCHEDULES = {"cosine": Cosine}
