"""Implicit differentiation with a truncated Neumann series."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Generator, Tensor

from rabo.errors import lookup
from rabo.hypergradients.conjugate_gradient import estimate
from rabo.hypergradients.curvature import lanczos
from rabo.hypergradients.linearisation import (
    LINEARISATIONS,
    Estimate,
    HypergradientEstimator,
    ImplicitSystem,
    Linearisation,
    Products,
    View,
)
from rabo.hypergradients.solvers import Solution, neumann
from rabo.problems.bilevel import Batch, BilevelProblem
from rabo.tree import Params

NUM_PROBES = 10  # products by which l_{g,1} is measured


@dataclass(frozen=True, kw_only=True)
class Neumann(HypergradientEstimator):
    """∇_x f − ∇²_xy g·v with v = η Σ_{k<K} (I − η∇²_yy g)^k ∇_y f.

    Converges for η < 2/l_{g,1}; without a step size, η = 1/l_{g,1} is measured.
    """

    num_terms: int = 10
    step_size: float | None = None
    products: Products = "exact"

    def __post_init__(self) -> None:
        if self.num_terms < 1:
            raise ValueError(f"num_terms must be at least 1, got {self.num_terms}")
        if self.step_size is not None and self.step_size <= 0:
            raise ValueError(f"step_size must be positive, got {self.step_size}")
        lookup("kind of products", self.products, LINEARISATIONS)

    def __call__(
        self,
        problem: BilevelProblem,
        x: Params,
        y: Params,
        batch: Batch,
        generator: Generator | None = None,
    ) -> Estimate:
        view = View(problem, x, y, batch, one_pass=True)
        return estimate(LINEARISATIONS[self.products](view), self.solve)

    @property
    def system(self) -> ImplicitSystem:
        return self

    @property
    def keeps_copies_apart(self) -> bool:
        return self.step_size is not None

    def linearise(
        self, problem: BilevelProblem, x: Params, y: Params, batch: Batch
    ) -> Linearisation:
        return LINEARISATIONS[self.products](View(problem, x, y, batch))

    def solve(self, product: Callable[[Tensor], Tensor], rhs: Tensor) -> Solution:
        step = self.step_size or 1 / safe_curvature(product, rhs)
        return neumann(product, rhs, self.num_terms, step)


def safe_curvature(product: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """Measure l_{g,1} with at most ten products."""
    return lanczos(product, like, NUM_PROBES).largest.to(like.dtype)
