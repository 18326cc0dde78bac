"""Algorithm 2, corrected: one difference of ∇_y g per coordinate of x."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from rabo.hypergradients.linearisation import (
    Difference,
    Estimate,
    HypergradientEstimator,
    View,
    gradient,
)
from rabo.hypergradients.solvers import conjugate_gradient
from rabo.problems.bilevel import Batch, BilevelProblem
from rabo.tree import Params, flatten, leaves, replace_leaves, unflatten


@dataclass(frozen=True, kw_only=True)
class CoordinateDifference(HypergradientEstimator):
    """∇_x f − Σ_p ⟨δ_p, v⟩ e_p with δ_p = [∇_y g(x + μe_p, y) − ∇_y g(x, y)] / μ.

    Departs from Algorithm 2, line 7, whose +⟨δ_p, ∇_y f⟩ has the wrong sign and lacks the inverse
    Hessian: here v = [∇²_yy g]⁻¹∇_y f, by CG on differences of ∇_y g. The error of each coordinate
    is at most μ l_{g,2}‖v‖/2. Costs one gradient per coordinate; `num_coordinates` samples some.
    """

    mu: float | None = None  # None: √eps of the dtype
    num_coordinates: int | None = None
    num_iterations: int = 10

    def __post_init__(self) -> None:
        check_coordinates(self.mu, self.num_coordinates)

    @property
    def is_random(self) -> bool:
        return self.num_coordinates is not None

    def __call__(
        self,
        problem: BilevelProblem,
        x: Params,
        y: Params,
        batch: Batch,
        generator: Generator | None = None,
    ) -> Estimate:
        view = View(problem, x, y, batch)
        system = Difference(view)
        solution = conjugate_gradient(system.product, system.rhs, self.num_iterations)
        difference = Coordinates(view, self.mu, self.num_coordinates, generator)
        cross = difference.along(solution.v)
        value = {k: a - b for k, a, b in zip(view.x, system.outer[1], cross, strict=True)}
        evaluations = system.evaluations + difference.evaluations
        return Estimate(value, solution.residual, solution.iterations, evaluations).checked()


def check_coordinates(mu: float | None, num_coordinates: int | None) -> None:
    if mu is not None and mu <= 0:
        raise ValueError(f"mu must be positive, got {mu}")
    if num_coordinates is not None and num_coordinates < 1:
        raise ValueError(f"num_coordinates must be at least 1, got {num_coordinates}")


class Coordinates:
    """⟨δ_p, v⟩ for chosen coordinates p of x."""

    def __init__(
        self, view: View, mu: float | None, count: int | None, generator: Generator | None
    ):
        self.view, self.evaluations = view, 0
        self.x = flatten([t.detach() for t in leaves(view.x)])
        self.mu = mu or float(torch.finfo(self.x.dtype).eps ** 0.5) * (
            1 + float(self.x.abs().max())
        )
        dimension = self.x.shape[1]
        self.chosen = list(range(dimension))
        if count is not None and count < dimension:
            self.chosen = torch.randperm(dimension, generator=generator)[:count].tolist()

    def along(self, v: Tensor) -> list[Tensor]:
        base = self._slope(self.x)
        inner = torch.zeros_like(self.x)
        for p in self.chosen:
            shifted = self.x.clone()
            shifted[0, p] += self.mu
            inner[0, p] = ((self._slope(shifted) - base) / self.mu * v).sum()
        return unflatten(inner, leaves(self.view.x))

    def _slope(self, flat: Tensor) -> Tensor:
        """∇_y g at another x."""
        view = self.view
        x = replace_leaves(view.x, unflatten(flat, leaves(view.x)))
        with torch.no_grad():
            z = view.problem.features(x, view.batch.inner)
        self.evaluations += 1
        y = view.y.detach().requires_grad_()
        return gradient(view.inner(y, z), [y])[0]
