"""Second-order-free hypergradient in two gradients (RAFBO's default)."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Generator, Tensor

from rabo.hypergradients.conjugate_gradient import estimate
from rabo.hypergradients.linearisation import Difference, Estimate, View
from rabo.hypergradients.solvers import Solution, conjugate_gradient
from rabo.problem import Batch, BilevelProblem
from rabo.tree import Params


@dataclass(frozen=True, kw_only=True)
class DirectionalDifference:
    """∇_x f − [∇_x g(x, y + εv) − ∇_x g(x, y − εv)] / 2ε, v by CG on differences of ∇_y g.

    Departs from Algorithm 2, which takes one gradient per coordinate of x: the cross product for
    all coordinates at once costs two gradients, and is exact to O(ε²).
    """

    num_iterations: int = 10
    tolerance: float = 0.0
    damping: float = 0.0

    def __post_init__(self) -> None:
        if self.num_iterations < 0:
            raise ValueError(f"num_iterations must be at least 0, got {self.num_iterations}")
        if self.tolerance < 0 or self.damping < 0:
            raise ValueError(
                f"tolerance and damping must not be negative, got {self.tolerance}, {self.damping}"
            )

    def __call__(
        self,
        problem: BilevelProblem,
        x: Params,
        y: Params,
        batch: Batch,
        generator: Generator | None = None,
    ) -> Estimate:
        return estimate(self.linearise(problem, x, y, batch), self.solve)

    def linearise(self, problem: BilevelProblem, x: Params, y: Params, batch: Batch) -> Difference:
        return Difference(View(problem, x, y, batch))

    def solve(self, product: Callable[[Tensor], Tensor], rhs: Tensor) -> Solution:
        return conjugate_gradient(product, rhs, self.num_iterations, self.tolerance, self.damping)
