"""Erratum 6: where clients differ, inverting each one's own Hessian does not lead to x*.

With T = 1 the rest point of Algorithm 1 on quadratics is known: y = H̄⁻¹(B̄x + c̄), and then
mean_i [P_i x − s_i + B_iᵀH_i⁻¹(K_i y − t_i)] = 0. Neither α nor β occurs in it: smaller steps do
not bring it nearer to x*. `hessian="global"` solves with the mean Hessian and rests at x*.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from experiments.theory.rounds import states
from rabo.algorithms import RABO
from rabo.hypergradients import ConjugateGradient
from rabo.pruning.policies import Full
from rabo.runs.plots import COLOURS, draw_slope, label, mark, new_figure, save
from rabo.seeding import stream
from rabo.tasks.quadratic import ClosedForm, Quadratic, random_quadratic

NUM_CLIENTS = 4
DIMENSION = 5
LEVELS = (0.0, 0.1, 0.3, 1.0, 3.0)  # heterogeneity
CONFIRMED = 1.0  # the level at which RABO runs
DURATION = 10.0  # α·rounds of a run

Hessian = Literal["local", "global"]


@dataclass(frozen=True)
class Run:
    """RABO itself, to the end."""

    hessian: Hessian
    alpha: float
    distances: tuple[float, ...]  # ‖x_q − x*‖/‖x*‖
    from_limit: float  # ‖x_Q − closed form‖/‖x*‖


@dataclass(frozen=True)
class Bias:
    """Relative distance of rest points from x*."""

    levels: tuple[float, ...]
    distances: tuple[float, ...]  # of hessian="local", in closed form, mean over draws
    confirmed_level: float
    confirmed_distance: float  # of the draw on which RABO runs, in closed form
    runs: tuple[Run, ...]

    @property
    def holds(self) -> dict[str, bool]:
        local = [run for run in self.runs if run.hessian == "local"]
        far = [run.distances[-1] > 0.9 * self.confirmed_distance for run in local]
        return {
            "no bias where clients are equal": self.distances[0] < 1e-9,
            "the bias grows with heterogeneity": list(self.distances) == sorted(self.distances),
            "smaller steps do not remove it": all(far) and self.confirmed_distance > 0.01,
            "RABO rests at the closed form": all(run.from_limit < 1e-3 for run in self.runs),
        }

    def __str__(self) -> str:
        levels = ", ".join(
            f"{h:g}: {d:.3g}" for h, d in zip(self.levels, self.distances, strict=True)
        )
        runs = ", ".join(
            f"{r.hessian} alpha={r.alpha:.3g}: {r.distances[-1]:.3g}" for r in self.runs
        )
        return (
            f"distance from x* of local Hessians by heterogeneity {levels}; RABO at "
            f"{self.confirmed_level:g} (closed form {self.confirmed_distance:.3g}): {runs}"
        )


def measure_bias(*, quick: bool, seed: int) -> Bias:
    """Compute rest points for each heterogeneity, and let RABO run to them for one."""
    num_draws = 20 if quick else 200
    clients = bias_clients(CONFIRMED, seed, 0)
    largest = 0.5 / _curvature(clients)
    runs = [_run(clients, "local", largest / k, seed) for k in ((1, 2) if quick else (1, 2, 4))]
    return Bias(
        levels=LEVELS,
        distances=tuple(_mean_distance(level, num_draws, seed) for level in LEVELS),
        confirmed_level=CONFIRMED,
        confirmed_distance=_distance(clients, local_limit(clients)),
        runs=(*runs, _run(clients, "global", largest, seed)),
    )


def bias_clients(level: float, seed: int, draw: int) -> list[Quadratic]:
    """Draw clients whose every coefficient differs."""
    family = random_quadratic(
        stream(seed, "bias", draw), DIMENSION, DIMENSION, heterogeneity=level, condition=3
    )
    return [family.client(stream(seed, "bias", draw, i)) for i in range(NUM_CLIENTS)]


def local_limit(problems: Sequence[Quadratic]) -> Tensor:
    """Return the x at which the mean of local hypergradients vanishes."""
    mean = ClosedForm.of(problems).mean
    forms = [p.coefficients for p in problems]
    inverses = [torch.linalg.solve(m.H, m.B).T for m in forms]  # B_iᵀH_i⁻¹
    pairs = list(zip(inverses, forms, strict=True))
    K = torch.stack([inverse @ m.K for inverse, m in pairs]).mean(dim=0)
    t = torch.stack([inverse @ m.t for inverse, m in pairs]).mean(dim=0)
    matrix = mean.P + K @ torch.linalg.solve(mean.H, mean.B)
    return torch.linalg.solve(matrix, mean.s + t - K @ torch.linalg.solve(mean.H, mean.c))


def _curvature(problems: Sequence[Quadratic]) -> float:
    """Return the largest eigenvalue of ∇²Φ."""
    m = ClosedForm.of(problems).mean
    jacobian = torch.linalg.solve(m.H, m.B)
    return float(torch.linalg.eigvalsh(m.P + jacobian.T @ m.K @ jacobian)[-1])


def _distance(problems: Sequence[Quadratic], x: Tensor) -> float:
    best = ClosedForm.of(problems).solution
    return float((x - best).norm() / best.norm())


def _mean_distance(level: float, num_draws: int, seed: int) -> float:
    drawn = [bias_clients(level, seed, draw) for draw in range(num_draws)]
    return sum(_distance(clients, local_limit(clients)) for clients in drawn) / num_draws


def _run(problems: Sequence[Quadratic], hessian: Hessian, alpha: float, seed: int) -> Run:
    algorithm = RABO(
        hypergradient=ConjugateGradient(num_iterations=DIMENSION),
        hessian=hessian,
        policy=Full(),
        alpha=alpha,
        num_inner_steps=1,
        calibrate_every=10**6,  # l_{g,1} of a quadratic does not change
        seed=seed,
    )
    truth = ClosedForm.of(problems).solution
    limit = local_limit(problems) if hessian == "local" else truth
    visited = [s.x["x"] for s in states(algorithm, problems, ceil(DURATION / alpha))]
    distances = tuple(_distance(problems, x) for x in visited)
    return Run(hessian, alpha, distances, float((visited[-1] - limit).norm() / truth.norm()))


def draw_bias(found: Bias, path: Path) -> None:
    """Draw the bias over heterogeneity, and how RABO comes to rest."""
    figure, (left, right) = new_figure(2)
    levels, distances = found.levels[1:], found.distances[1:]  # no logarithm of zero
    left.plot(levels, distances, "o-", color=COLOURS[0], label='hessian="local", closed form')
    left.plot([], [], " ", label='zero: hessian="global", or equal clients')
    draw_slope(left, levels[:3], distances[0], 2.0, "slope 2")
    distance = r"$\|x - x^*\| / \|x^*\|$"
    label(left, "Where the algorithm rests", "heterogeneity", distance)
    mark(left, levels)
    for run, colour in zip(found.runs, COLOURS, strict=False):
        time = [run.alpha * q for q in range(len(run.distances))]
        style = "-" if run.hessian == "local" else "--"
        name = rf"{run.hessian}, $\alpha$ = {run.alpha:.3g}"
        right.plot(time, run.distances, style, color=colour, label=name)
    closed = f"closed form, local: {found.confirmed_distance:.3g}"
    right.axhline(found.confirmed_distance, color="black", linewidth=0.8, label=closed)
    title = f"RABO at heterogeneity {found.confirmed_level:g}"
    label(right, title, r"$\alpha\,\cdot$ round", distance, "linear-log")
    save(figure, path)
