"""Implicit differentiation with conjugate gradients (AID-CG)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor

from rabo.errors import lookup
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
from rabo.hypergradients.solvers import Solution, conjugate_gradient
from rabo.problems.bilevel import Batch, BilevelProblem
from rabo.tree import Params

NUM_PROBES = 10  # products by which curvature is measured


@dataclass(frozen=True, kw_only=True)
class ConjugateGradient(HypergradientEstimator):
    """∇_x f − ∇²_xy g·v with (∇²_yy g + damping·I) v = ∇_y f solved by K steps of CG.

    One graph of ∇_y g is retained and serves all Hessian products and the cross term. For a y that
    is a deep net, damping="auto" measures the smallest curvature with ten more products and adds
    what makes it positive; where it is positive anyway, nothing.
    """

    num_iterations: int = 10
    tolerance: float = 0.0
    damping: float | Literal["auto"] = 0.0
    products: Products = "exact"

    def __post_init__(self) -> None:
        if self.num_iterations < 0:
            raise ValueError(f"num_iterations must be at least 0, got {self.num_iterations}")
        if self.tolerance < 0:
            raise ValueError(f"tolerance must not be negative, got {self.tolerance}")
        if self.damping != "auto" and (isinstance(self.damping, str) or self.damping < 0):
            raise ValueError(f"damping must not be negative, or 'auto', got {self.damping!r}")
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
        return self.damping != "auto" and not self.tolerance

    def linearise(
        self, problem: BilevelProblem, x: Params, y: Params, batch: Batch
    ) -> Linearisation:
        return LINEARISATIONS[self.products](View(problem, x, y, batch))

    def solve(self, product: Callable[[Tensor], Tensor], rhs: Tensor) -> Solution:
        damping = self.damping
        if damping == "auto":
            found = lanczos(product, rhs, NUM_PROBES)
            lack = torch.where(found.smallest < 0, found.margin - found.smallest, 0.0)
            damping = (1.1 * lack).to(rhs.dtype)  # a little more: exactly as much is singular
        return conjugate_gradient(product, rhs, self.num_iterations, self.tolerance, damping)


def estimate(
    system: Linearisation, solve: Callable[[Callable[[Tensor], Tensor], Tensor], Solution]
) -> Estimate:
    """Solve a linearised problem and take the answer back to x."""
    solution = solve(system.product, system.rhs)
    value = system.pull_back(solution.v)
    return Estimate(
        value, solution.residual, solution.iterations, system.evaluations, solution.curvature
    ).checked()
