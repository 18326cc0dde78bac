"""Algorithm 2 as printed, to measure its error (erratum 2)."""

from dataclasses import dataclass

from torch import Generator

from rabo.hypergradients import ESTIMATORS
from rabo.hypergradients.coordinate_difference import Coordinates, check_coordinates
from rabo.hypergradients.linearisation import (
    Difference,
    Estimate,
    HypergradientEstimator,
    View,
)
from rabo.hypergradients.solvers import relative
from rabo.problems.bilevel import Batch, BilevelProblem
from rabo.tree import Params

NAME = "literal-coordinate-difference"


@dataclass(frozen=True, kw_only=True)
class LiteralCoordinateDifference(HypergradientEstimator):
    """Algorithm 2 as printed: ∇_x f + Σ_p ⟨δ_p, ∇_y f⟩ e_p.

    Kept to show the flaw: δ_p is a column of ∇²_yx g, not of dy*/dx, so this is not a hypergradient
    and descent along it diverges. The residual reported is that of v = −∇_y f.
    """

    mu: float | None = None
    num_coordinates: int | None = None

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
        difference = Coordinates(view, self.mu, self.num_coordinates, generator)
        cross = difference.along(system.rhs)
        value = {k: a + b for k, a, b in zip(view.x, system.outer[1], cross, strict=True)}
        residual = relative(system.product(-system.rhs) - system.rhs, system.rhs)
        evaluations = system.evaluations + difference.evaluations
        return Estimate(value, residual, 0, evaluations).checked()


def register() -> None:
    """Let the experiments on errata choose the estimator by its name."""
    ESTIMATORS[NAME] = LiteralCoordinateDifference
