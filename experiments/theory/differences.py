"""Lemma 3, corrected: the error of coordinate differences is linear in μ and governed by l_{g,2}.

‖estimate − truth‖ ≤ (μ/2) l_{g,2} ‖v‖ √|P|  with  ∇²_yy g·v = ∇_y f

Departs from Lemma 3, whose l_{g,1} cannot govern a forward difference of ∇_y g. The problem is
g = mean_j softplus(a_jᵀy + d_jᵀx) + ρ‖y‖²/2, so that ∇²g depends on x, and f = ‖y − t‖²/2, which
sees x through y alone as a validation loss does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.theory.literal import LiteralCoordinateDifference
from rabo.hypergradients import CoordinateDifference, HypergradientEstimator
from rabo.problems.problem import Problem
from rabo.runs.plots import COLOURS, draw_slope, label, log_slope, new_figure, save
from rabo.seeding import stream
from rabo.tree import Params

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DIM_X, DIM_Y, NUM_TERMS = 12, 8, 40
RIDGE = 0.1  # ρ
STEEPEST = 1 / (6 * 3**0.5)  # max |softplus'''|
STEPS = tuple(10 ** (-k / 2) for k in range(0, 25))  # μ from 1 to 1e-12
LINEAR = (1e-6, 1e-2)  # no curvature of higher order above, no rounding below


@dataclass(frozen=True)
class Differences:
    """How far Algorithm 2 is from the hypergradient, corrected and as printed."""

    steps: tuple[float, ...]  # μ
    errors: tuple[float, ...]
    bounds: tuple[float, ...]
    slope: float  # of log error over log μ in the linear range
    leading: float  # the limit of error/μ, in closed form
    lipschitz: float  # a bound of l_{g,2}
    hypergradient_norm: float
    literal_cosine: float
    literal_relative_error: float

    @property
    def holds(self) -> dict[str, bool]:
        return {
            "the error is linear in mu": abs(self.slope - 1) <= 0.1,
            "the error is below the bound": self.tightness <= 1,
            "the printed formula points uphill": self.literal_cosine < 0,
        }

    @property
    def tightness(self) -> float:
        """Return the largest share of the bound that the error takes where it is linear."""
        triples = zip(self.steps, self.errors, self.bounds, strict=True)
        return max(e / b for mu, e, b in triples if mu >= LINEAR[0])

    def __str__(self) -> str:
        best = min(range(len(self.errors)), key=self.errors.__getitem__)
        return (
            f"the error grows like mu^{self.slope:.3f}, at {self.tightness:.1%} of its bound; the "
            f"least is {self.errors[best]:.1e} at mu = {self.steps[best]:.0e}; as printed: cosine "
            f"{self.literal_cosine:.3f}, relative error {self.literal_relative_error:.2f}"
        )


class Curved(NamedTuple):
    """The problem, a point, and what is known of it in dense float64."""

    problem: Problem
    x: Params
    y: Params
    truth: Tensor
    v: Tensor
    leading: float
    lipschitz: float


def measure_differences(*, quick: bool, seed: int) -> Differences:
    """Compare both forms of Algorithm 2 with a dense solve, for many μ; quick is the same."""
    curved = curved_problem(seed)
    corrected = [CoordinateDifference(mu=mu, num_iterations=20) for mu in STEPS]
    errors = tuple(float((_estimate(curved, each) - curved.truth).norm()) for each in corrected)
    rate = curved.lipschitz * float(curved.v.norm()) * DIM_X**0.5 / 2
    linear = [(mu, e) for mu, e in zip(STEPS, errors, strict=True) if LINEAR[0] <= mu <= LINEAR[1]]
    literal = _estimate(curved, LiteralCoordinateDifference(mu=1e-6))
    return Differences(
        steps=STEPS,
        errors=errors,
        bounds=tuple(rate * mu for mu in STEPS),
        slope=log_slope(*zip(*linear, strict=True)),
        leading=curved.leading,
        lipschitz=curved.lipschitz,
        hypergradient_norm=float(curved.truth.norm()),
        literal_cosine=float(F.cosine_similarity(literal, curved.truth, dim=0)),
        literal_relative_error=float((literal - curved.truth).norm() / curved.truth.norm()),
    )


def curved_problem(seed: int) -> Curved:
    """Draw a problem and solve it densely at a random point."""
    generator = stream(seed, "differences")

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    a, d, t, x, y = (
        normal(*s) for s in ((NUM_TERMS, DIM_Y), (NUM_TERMS, DIM_X), (DIM_Y,), (DIM_X,), (DIM_Y,))
    )

    def inner(x: Params, y: Params, data: object) -> Tensor:
        return F.softplus(a @ y["y"] + d @ x["x"]).mean() + RIDGE * y["y"].square().sum() / 2

    def outer(x: Params, y: Params, data: object) -> Tensor:
        return (y["y"] - t).square().sum() / 2

    half = torch.sigmoid(a @ y + d @ x)
    second = half * (1 - half) / NUM_TERMS  # softplus''
    third = second * (1 - 2 * half)
    hessian = a.T @ (second[:, None] * a) + RIDGE * torch.eye(DIM_Y, dtype=torch.float64)
    v = torch.linalg.solve(hessian, y - t)
    truth = -d.T @ (second * (a @ v))
    leading = float((d.square().T @ (third * (a @ v))).norm() / 2)
    problem = Problem(inner=inner, outer=outer, x={"x": x}, y={"y": y}, prune="none")
    bound = lipschitz_bound(torch.cat([d, a], dim=1))
    return Curved(problem, {"x": x}, {"y": y}, truth, v, leading, bound)


def lipschitz_bound(rows: Tensor) -> float:
    """Bound l_{g,2}, the largest mean_j |softplus'''| |w_jᵀu|³ over unit vectors u.

    mean_j |w_jᵀu|³ ≤ max_j ‖w_j‖ · mean_j (w_jᵀu)² ≤ max_j ‖w_j‖ · λ_max(mean_j w_j w_jᵀ).
    """
    spectrum = torch.linalg.eigvalsh(rows.T @ rows / len(rows))
    return STEEPEST * float(rows.norm(dim=1).max() * spectrum[-1])


def _estimate(curved: Curved, estimator: HypergradientEstimator) -> Tensor:
    client = curved.problem.on(inner=None, outer=None)
    return estimator(client, curved.x, curved.y, client.data).value["x"]


def draw_differences(found: Differences, path: Path) -> None:
    """Draw the error over μ beside its bound."""
    figure, (panel,) = new_figure(1)
    _plot(panel, found.steps, found.errors, "o-", 0, "corrected Algorithm 2")
    _plot(panel, found.steps, found.bounds, "-", 3, r"bound $(\mu/2)\,l_{g,2}\|v\|\sqrt{|P|}$")
    literal = found.literal_relative_error * found.hypergradient_norm
    _plot(panel, found.steps, [literal] * len(found.steps), ":", 4, "Algorithm 2 as printed")
    linear = [mu for mu in found.steps if mu >= LINEAR[0]]
    draw_slope(panel, linear, found.leading * linear[0], 1.0, "slope 1, in closed form")
    label(panel, "Error of a hypergradient by differences", r"$\mu$", "error of the hypergradient")
    save(figure, path)


def _plot(
    panel: "Axes", x: Sequence[float], y: Sequence[float], style: str, colour: int, name: str
) -> None:
    panel.plot(x, y, style, color=COLOURS[colour], markersize=4, label=name)
