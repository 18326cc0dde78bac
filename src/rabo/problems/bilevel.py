"""One client's share of the bilevel problem (Eq. 2), as algorithms see it."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from torch import Generator, Tensor

from rabo.pruning.channels import Channels
from rabo.pruning.submodel import Cut
from rabo.tree import Params

Level: TypeAlias = Literal["inner", "outer"]


class Batch(NamedTuple):
    """What one evaluation sees: ξ for the inner loss g, ζ for the outer loss f."""

    inner: Any
    outer: Any


class BilevelProblem(Protocol):
    """min_x f(x, y*(x)) with y*(x) = argmin_y g(x, y), as far as one client knows it.

    The losses see x through `features`: z(x). Where y is a head on a backbone x, they are what is
    computed once and reused; elsewhere z = x.
    """

    @property
    def channels(self) -> Channels: ...

    @property
    def copies(self) -> int:
        """How many independent copies of y the client trains (1, or one per task)."""
        ...

    @property
    def redraw(self) -> Literal["step", "round"]:
        """Whether every step draws its own batch, or one batch serves a whole round."""
        ...

    def start(self) -> tuple[Params, Params]:
        """Return x_0 and y_0."""
        ...

    def batch(self, generator: Generator) -> Batch: ...

    def features(self, x: Params, part: Any) -> Any:
        """Return z(x) on one part of a batch."""
        ...

    def inner(self, z: Any, y: Params, part: Any) -> Tensor:
        """Return g_i."""
        ...

    def outer(self, z: Any, y: Params, part: Any) -> Tensor:
        """Return f_i."""
        ...

    def restrict(self, cut: Cut) -> "BilevelProblem":
        """Return the same problem on smaller tensors."""
        ...

    @property
    def shape_key(self) -> Any:
        """Equal for problems that cost the same."""
        ...


def features_of(problem: BilevelProblem, x: Params, parts: Sequence[Any]) -> list[Any]:
    """Return z(x) on several parts of a batch; a problem that has `features_of` takes one pass."""
    together = getattr(problem, "features_of", None)
    return together(x, parts) if together else [problem.features(x, part) for part in parts]
