"""Lemma 4: a round brings y nearer to y*(x), up to a floor set by noise and by C*_y.

E‖y_{q+1} − y*(x_q)‖² ≤ (1 − βμ_g) E‖y_q − y*(x_q)‖² + 4NTβ²(σ_g² + δ_g²)/C*_y

Real rounds of RABO on diagonal quadratics, where masks on y bias nothing; x is frozen by a tiny α.
σ_g² and δ_g² are squared norms: with noise of size σ in each of d coordinates, σ_g² = dσ².
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from experiments.theory.rounds import Blocks, states
from rabo.algorithms import RABO, State
from rabo.hypergradients import ConjugateGradient
from rabo.runs.plots import COLOURS, label, mark, new_figure, save
from rabo.seeding import stream
from rabo.tasks.quadratic import ClosedForm, Quadratic, random_quadratic

NUM_CLIENTS = 8  # N
DIMENSION = 64
SIGMA = 0.3
NUM_STEPS = (1, 2, 5)  # T
COVERAGES = (1, 2, 4, 8)  # C*_y
HORIZON = 1000  # Q of the corollary's β = 1/(NTQ)


@dataclass(frozen=True)
class Floor:
    """Where noise holds the inner error, for one T and each C*_y."""

    num_inner_steps: int
    coverages: tuple[int, ...]
    measured: tuple[float, ...]
    exact: tuple[float, ...]  # Σ_k βσ²/(Cλ_k(2 − βλ_k)), whatever T
    bound: tuple[float, ...]  # 4NTβ(σ_g² + δ_g²)/(C*_y μ_g), the rest point of the lemma


@dataclass(frozen=True)
class FixedMasks:
    """One round from the rest point of fixed masks, where clients differ by δ_g."""

    beta: float  # 1/(NTQ), the corollary's
    before: float  # ‖y_q − y*‖²
    after: float  # ‖y_{q+1} − y*‖²
    floor: float  # what the lemma lets a rest point have


@dataclass(frozen=True)
class Contraction:
    """What a round does to the inner error."""

    lemma: float  # 1 − βμ_g
    num_inner_steps: tuple[int, ...]
    errors: tuple[tuple[float, ...], ...]  # ‖y_q − y*‖² without noise, by T
    factors: tuple[float, ...]  # the worst of a round, by T
    exact: tuple[float, ...]  # (1 − βμ_g)^{2T}
    floors: tuple[Floor, ...]
    fixed_masks: FixedMasks

    @property
    def holds(self) -> dict[str, bool]:
        lemma, fixed = self.lemma * (1 + 1e-9), self.fixed_masks
        below = [m <= b for f in self.floors for m, b in zip(f.measured, f.bound, strict=True)]
        return {
            "a noiseless round contracts by 1 - beta mu_g": max(self.factors) <= lemma,
            "more inner steps contract more": list(self.factors) == sorted(self.factors)[::-1],
            "noise settles below the floor": all(below),
            "fixed masks break the floor where clients differ": fixed.after > 2 * fixed.floor,
        }

    def __str__(self) -> str:
        pairs = zip(self.num_inner_steps, self.factors, strict=True)
        factors = ", ".join(f"T={t}: {factor:.3f}" for t, factor in pairs)
        shares = [m / b for f in self.floors for m, b in zip(f.measured, f.bound, strict=True)]
        fixed = self.fixed_masks.after / self.fixed_masks.floor
        return (
            f"a round multiplies the squared inner error by {factors} (lemma: {self.lemma:.3f}); "
            f"noise settles at {min(shares):.1%} to {max(shares):.1%} of the floor; fixed masks "
            f"on clients that differ rest at {fixed:.3g} times the floor of beta = 1/(NTQ)"
        )


def measure_contraction(*, quick: bool, seed: int) -> Contraction:
    """Run RABO with x frozen: without noise, with noise, and on clients that differ."""
    problems = _clients(seed)
    beta, smallest = _step(problems), _smallest(problems)
    errors = tuple(tuple(_errors(problems, 4, t, beta, 25, seed)) for t in NUM_STEPS)
    noisy = [replace(p, sigma_g=SIGMA) for p in problems]
    rounds = 80 if quick else 300
    return Contraction(
        lemma=1 - beta * smallest,
        num_inner_steps=NUM_STEPS,
        errors=errors,
        factors=tuple(_worst_factor(each) for each in errors),
        exact=tuple((1 - beta * smallest) ** (2 * t) for t in NUM_STEPS),
        floors=tuple(_floor(noisy, t, rounds, seed) for t in ((1,) if quick else (1, 4))),
        fixed_masks=_fixed_masks(seed),
    )


def _clients(seed: int) -> list[Quadratic]:
    """Clients that do not differ: δ_g = 0."""
    family = random_quadratic(
        stream(seed, "contraction"),
        DIMENSION,
        DIMENSION,
        heterogeneity=0,
        diagonal=True,
        condition=3,
    )
    return [family.client(stream(seed, "client", i)) for i in range(NUM_CLIENTS)]


def _step(problems: Sequence[Quadratic]) -> float:
    """β = 1/(2 l_{g,1}), with the curvature in y alone: the largest step the lemma admits."""
    return 1 / (2 * float(problems[0].coefficients.H.diagonal().max()))


def _smallest(problems: Sequence[Quadratic]) -> float:
    """μ_g."""
    return float(problems[0].coefficients.H.diagonal().min())


def _errors(
    problems: Sequence[Quadratic],
    coverage: int,
    num_inner_steps: int,
    beta: float,
    num_rounds: int,
    seed: int,
    start: State | None = None,
) -> list[float]:
    """Return ‖y_q − y*(x_q)‖² before the first round and after each."""
    algorithm = RABO(
        hypergradient=ConjugateGradient(num_iterations=0),
        policy=Blocks(NUM_CLIENTS // coverage, cut_groups="y"),
        alpha=1e-12,
        beta=beta,
        num_inner_steps=num_inner_steps,
        seed=seed,
    )
    truth = ClosedForm.of(problems)
    visited = states(algorithm, problems, num_rounds, start)
    return [float((s.y["y"] - truth.inner_solution(s.x["x"])).square().sum()) for s in visited]


def _worst_factor(errors: Sequence[float]) -> float:
    """Return the largest ratio of neighbours, as long as rounding does not matter."""
    return max(b / a for a, b in pairwise(errors) if b > 1e-18 * errors[0])


def _floor(problems: Sequence[Quadratic], num_inner_steps: int, rounds: int, seed: int) -> Floor:
    beta, curvature = _step(problems), problems[0].coefficients.H.diagonal()
    variance = float((beta * SIGMA**2 / (curvature * (2 - beta * curvature))).sum())
    bound = 4 * NUM_CLIENTS * num_inner_steps * beta * DIMENSION * SIGMA**2 / _smallest(problems)
    runs = [_errors(problems, c, num_inner_steps, beta, rounds, seed) for c in COVERAGES]
    settled = [each[rounds // 3 :] for each in runs]
    return Floor(
        num_inner_steps,
        COVERAGES,
        tuple(sum(each) / len(each) for each in settled),
        tuple(variance / c for c in COVERAGES),
        tuple(bound / c for c in COVERAGES),
    )


def _fixed_masks(seed: int) -> FixedMasks:
    """Show a gap of the lemma: where masks are fixed, y_k follows the few clients that hold it.

    They agree on y_k = (x_k + mean c_{i,k})/λ_k over themselves, not over all, whatever β; the
    lemma's floor shrinks with β. One round of RABO from there, with the corollary's β.
    """
    problems = [
        replace(p, coefficients=p.coefficients._replace(c=_normal(seed, i)))
        for i, p in enumerate(_clients(seed))
    ]
    offsets = torch.stack([p.coefficients.c for p in problems])
    spread = float((offsets - offsets.mean(dim=0)).square().sum(dim=1).max())  # δ_g²
    holder = torch.arange(DIMENSION) * NUM_CLIENTS // DIMENSION
    x = problems[0].start()[0]["x"]
    rest = (x + offsets[holder, torch.arange(DIMENSION)]) / problems[0].coefficients.H.diagonal()
    beta = 1 / (NUM_CLIENTS * HORIZON)
    start = State(0, {"x": x}, {"y": rest})
    before, after = _errors(problems, 1, 1, beta, 1, seed, start)
    return FixedMasks(beta, before, after, 4 * NUM_CLIENTS * beta * spread / _smallest(problems))


def _normal(seed: int, client: int) -> Tensor:
    generator = stream(seed, "offset", client)
    return torch.randn(DIMENSION, generator=generator, dtype=torch.float64)


def draw_contraction(found: Contraction, path: Path) -> None:
    """Draw errors over rounds, and floors over C*_y."""
    figure, (left, right) = new_figure(2)
    for t, errors, colour in zip(found.num_inner_steps, found.errors, COLOURS, strict=False):
        left.plot(errors, color=colour, marker=".", label=f"RABO, T = {t}")
    bound = [found.errors[0][0] * found.lemma**q for q in range(len(found.errors[0]))]
    left.plot(bound, color="black", linestyle="--", label=r"Lemma 4: $(1-\beta\mu_g)^q$")
    label(left, "Without noise", "round q", r"$\|y_q - y^*(x)\|^2$", "linear-log")
    for floor, colour, marker in zip(found.floors, COLOURS, "ox", strict=False):
        t, c = floor.num_inner_steps, floor.coverages
        right.plot(c, floor.measured, marker, color=colour, label=f"RABO, T = {t}")
        right.plot(c, floor.bound, "--", color=colour, label=f"Lemma 4's floor, T = {t}")
    exact = found.floors[0]
    right.plot(exact.coverages, exact.exact, color="black", linewidth=1, label="exact, any T")
    label(right, "With noise, settled", r"covering clients $C^*_y$", r"mean $\|y_q - y^*(x)\|^2$")
    mark(right, exact.coverages)
    save(figure, path)
