"""Corollary 1: with α = c√(C*_x/Q) the mean of ‖∇Φ(x_q)‖² over Q rounds falls like 1/√(C*_x Q).

Clients have equal H, B, K and P, else local hypergradients are biased (see `bias`); they differ in
c, t and s. Equal coordinates of x and y are cut together, and blocks rotate over the clients.
Departs from the corollary in β = 1/(2 l_{g,1}): with its 1/(NTQ), y would not follow y*(x).

Two terms of Theorem 1 do not fall as it says, because its proof puts an upper bound of ‖x_{q+1} −
x_q‖² under the negative factor −1/(2α) + L_f/2; both are measured beside their closed form:
fixed blocks leave δ² (each x_s goes where its few clients want it), and cutting x but not y
leaves w_1² (a client that does not hold x_s pulls y_s to where x_s = 0 would have it).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from experiments.theory.diagonal import (
    DiagonalRound,
    diagonals,
    difference_from_round,
    held_by,
    hypergradient,
)
from experiments.theory.rounds import Blocks
from rabo.runs.plots import COLOURS, draw_slope, label, log_slope, mark, new_figure, save
from rabo.seeding import stream
from rabo.tasks.quadratic import Coefficients, Quadratic, random_quadratic

NUM_CLIENTS = 8
DIMENSION = 16
SIGMA = 6.0  # σ_f of one coordinate: noise and start then matter about equally
HETEROGENEITY = 1.0
COVERAGES = (1, 2, 4, 8)  # C*_x
FLOOR_COVERAGE = 2
STEP = 0.2  # c in α = c√(C*_x/Q)
NUM_INNER_STEPS = 3  # T
TOLERANCE = 0.1  # of both slopes


@dataclass(frozen=True)
class Floor:
    """Masks for which the mean does not fall to zero."""

    name: str
    values: tuple[float, ...]  # by Q
    limit: float  # ‖∇Φ‖² at the rest point, in closed form

    @property
    def extrapolated(self) -> float:
        """Return a of a + b/√Q through the last two Q, one 4 times the other."""
        return 2 * self.values[-1] - self.values[-2]


@dataclass(frozen=True)
class Rate:
    """Mean over Q rounds (and over seeds) of ‖∇Φ(x_q)‖²."""

    rounds: tuple[int, ...]  # Q
    coverages: tuple[int, ...]  # C*_x
    values: tuple[tuple[float, ...], ...]  # by C*_x, then by Q
    slopes_in_rounds: tuple[float, ...]  # by C*_x
    slopes_in_coverage: tuple[float, ...]  # by Q
    floors: tuple[Floor, ...]
    difference_from_round: float  # between the vectorised round and RABO.round

    @property
    def holds(self) -> dict[str, bool]:
        slopes = self.slopes_in_rounds
        return {
            "falls like Q^-1/2": all(abs(s + 0.5) <= TOLERANCE for s in slopes),
            "falls like C^-1/2": abs(self.slopes_in_coverage[-1] + 0.5) <= TOLERANCE,
            "fixed blocks and cutting x alone leave a floor": all(
                abs(floor.extrapolated / floor.limit - 1) < 0.3 for floor in self.floors
            ),
            "the vectorised round is RABO's": self.difference_from_round < 1e-10,
        }

    def __str__(self) -> str:
        slopes = ", ".join(f"{s:.3f}" for s in self.slopes_in_rounds)
        floors = "; ".join(
            f"{f.name} leave {f.extrapolated:.3g} (closed form {f.limit:.3g})" for f in self.floors
        )
        return (
            f"slopes in Q for C = {self.coverages}: {slopes}; slope in C at Q = {self.rounds[-1]}: "
            f"{self.slopes_in_coverage[-1]:.3f}; {floors}"
        )


def measure_rate(*, quick: bool, seed: int) -> Rate:
    """Run many rounds for each Q and C*_x, and two mask policies that leave a floor."""
    problems = rate_clients(seed)
    rounds = (64, 256, 1024, 4096) if quick else (64, 256, 1024, 4096, 16384)
    num_seeds = 16 if quick else 32
    policies = [Blocks(NUM_CLIENTS // c, rotate=True) for c in COVERAGES]
    num_blocks = NUM_CLIENTS // FLOOR_COVERAGE
    policies += [Blocks(num_blocks), Blocks(num_blocks, rotate=True, cut_groups="x")]
    found = torch.stack([_mean_squares(problems, policies, q, num_seeds, seed) for q in rounds], 1)
    values = [tuple(row) for row in found.tolist()]
    curves = values[: len(COVERAGES)]
    return Rate(
        rounds=rounds,
        coverages=COVERAGES,
        values=tuple(curves),
        slopes_in_rounds=tuple(log_slope(rounds, curve) for curve in curves),
        slopes_in_coverage=tuple(log_slope(COVERAGES, each) for each in zip(*curves, strict=True)),
        floors=(
            Floor("fixed blocks", values[-2], _fixed_limit(problems)),
            Floor("blocks of x alone", values[-1], _whole_limit(problems)),
        ),
        difference_from_round=difference_from_round(
            vectorised(problems, policies[1:2], 16), problems, policies[1], 16, seed
        ),
    )


def rate_clients(seed: int) -> list[Quadratic]:
    """Draw clients that differ in c, t and s alone."""
    family = random_quadratic(
        stream(seed, "rate"),
        DIMENSION,
        DIMENSION,
        heterogeneity=HETEROGENEITY,
        diagonal=True,
        condition=2,
    )
    common = family.common
    equal = {"H": common.H, "B": common.B, "K": common.K, "P": common.P}
    drawn = [family.client(stream(seed, "client", i), sigma_f=SIGMA) for i in range(NUM_CLIENTS)]
    return [replace(p, coefficients=p.coefficients._replace(**equal)) for p in drawn]


def _mean_squares(
    problems: Sequence[Quadratic],
    policies: Sequence[Blocks],
    num_rounds: int,
    num_seeds: int,
    seed: int,
) -> Tensor:
    """Return the mean of ‖∇Φ(x_q)‖² over rounds and seeds for each policy."""
    step = vectorised(problems, policies, num_rounds)
    masks = [
        held_by(policies, step.clients, q) for q in range(NUM_CLIENTS)
    ]  # blocks come round after that
    generator = stream(seed, "noise", num_rounds)
    x = torch.ones(len(policies), num_seeds, DIMENSION, dtype=torch.float64)
    y, total = torch.zeros_like(x), torch.zeros(len(policies), dtype=torch.float64)
    for q in range(num_rounds):
        total += hypergradient(step.clients, x).square().sum(dim=-1).mean(dim=-1)
        shape = (num_seeds, NUM_CLIENTS, DIMENSION)
        noise = SIGMA * torch.randn(shape, generator=generator, dtype=torch.float64)
        x, y = step(x, y, *masks[q % NUM_CLIENTS], noise)
    return total / num_rounds


def vectorised(
    problems: Sequence[Quadratic], policies: Sequence[Blocks], num_rounds: int
) -> DiagonalRound:
    """Return a round with α = c√(C*_x/Q) for each policy."""
    coverage = torch.tensor([NUM_CLIENTS / p.num_blocks for p in policies], dtype=torch.float64)
    alpha = STEP * (coverage / num_rounds).sqrt()
    return DiagonalRound(
        diagonals(problems), alpha[:, None, None], _beta(problems), NUM_INNER_STEPS
    )


def _beta(problems: Sequence[Quadratic]) -> float:
    return 1 / (2 * float(problems[0].coefficients.H.diagonal().max()))


def _fixed_limit(problems: Sequence[Quadratic]) -> float:
    """‖∇Φ‖² where every coordinate solves the problem of its own clients."""
    clients = diagonals(problems)
    held, _ = held_by([Blocks(NUM_CLIENTS // FLOOR_COVERAGE)], clients, 0)
    own = [(held[0, 0] * each).sum(dim=0) / FLOOR_COVERAGE for each in clients]
    return _squared_at_rest(clients, own, coupling=1.0)


def _whole_limit(problems: Sequence[Quadratic]) -> float:
    """‖∇Φ‖² where y sees x only through the clients that hold it: y = H⁻¹((C/n) B x + c)."""
    clients = diagonals(problems)
    return _squared_at_rest(
        clients, [each.mean(dim=0) for each in clients], FLOOR_COVERAGE / NUM_CLIENTS
    )


def _squared_at_rest(clients: Coefficients, own: Sequence[Tensor], coupling: float) -> float:
    """‖∇Φ(x)‖² at Px − s + BH⁻¹(Ky − t) = 0 with y = H⁻¹(coupling·Bx + c)."""
    H, B, c, K, t, P, s = own
    x = (s - B / H * (K * c / H - t)) / (P + coupling * B**2 * K / H**2)
    return float(hypergradient(clients, x).square().sum())


def draw_rate(found: Rate, path: Path) -> None:
    """Draw the mean over Q and over C*_x."""
    figure, (left, right) = new_figure(2)
    for c, curve, colour in zip(found.coverages, found.values, COLOURS, strict=False):
        left.plot(found.rounds, curve, "o-", color=colour, label=rf"$C^*_x$ = {c}")
    for floor, marker in zip(found.floors, "sv", strict=True):
        name = f"{floor.name}, $C^*_x$ = {FLOOR_COVERAGE}"
        left.plot(found.rounds, floor.values, f"{marker}:", color="grey", label=name)
        left.axhline(floor.limit, color="grey", linewidth=0.6)
        left.annotate(
            f"limit of {floor.name}", (found.rounds[0], floor.limit), fontsize=7, va="bottom"
        )
    draw_slope(left, found.rounds, found.values[0][0] * 1.3, -0.5, "slope -1/2")
    mean = r"mean over q of $\|\nabla\Phi(x_q)\|^2$"
    label(left, r"$\alpha = c\sqrt{C^*_x/Q}$", "rounds Q", mean)
    by_rounds = zip(found.rounds, zip(*found.values, strict=True), COLOURS, strict=False)
    for q, each, colour in by_rounds:
        right.plot(found.coverages, each, "o-", color=colour, label=f"Q = {q}")
    draw_slope(right, found.coverages, found.values[0][0] * 1.3, -0.5, "slope -1/2")
    label(right, "Speed-up by covering clients", r"covering clients $C^*_x$", mean)
    mark(left, found.rounds)
    mark(right, found.coverages)
    save(figure, path)
