"""One round of RABO on diagonal quadratics, for many runs at once.

A round of the library takes milliseconds per client; a rate needs 10⁵ of them. Here a round is
elementwise arithmetic on tensors of shape (..., n, d): runs, clients, coordinates. A test and every
measurement of the rate compare it with `RABO.round`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.theory.rounds import Blocks, states
from rabo.algorithms import RABO
from rabo.hypergradients import ConjugateGradient
from rabo.seeding import stream
from rabo.tasks.quadratic import Coefficients, Quadratic


def diagonals(problems: Sequence[Quadratic]) -> Coefficients:
    """Return the coefficients of all clients, matrices as their diagonals: shape (n, d)."""
    stacked = zip(*(p.coefficients for p in problems), strict=True)
    return Coefficients(
        *(torch.stack([t.diagonal() if t.dim() == 2 else t for t in each]) for each in stacked)
    )


@dataclass(frozen=True, eq=False)
class DiagonalRound:
    """Algorithm 1, lines 3-33, with exact local hypergradients and noise in ∇_x f alone."""

    clients: Coefficients
    alpha: float | Tensor  # one for all runs, or shape (..., 1)
    beta: float
    num_inner_steps: int

    def __call__(
        self, x: Tensor, y: Tensor, held_x: Tensor, held_y: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return x_{q+1} and y_{q+1} of shape (..., d); masks and noise have shape (..., n, d)."""
        m = self.clients
        pull = m.B * (held_x * x[..., None, :]) + m.c
        local = y[..., None, :]
        for _ in range(self.num_inner_steps):  # lines 6-10
            local = local - self.beta * (m.H * local - pull)
        y = covered_mean(y, local, held_y)  # lines 12-20
        implicit = held_y * m.B / m.H * (m.K * y[..., None, :] - m.t)
        slope = m.P * x[..., None, :] - m.s + noise + implicit  # line 23
        return covered_mean(x, x[..., None, :] - self._step * slope, held_x), y  # lines 25-33

    @property
    def _step(self) -> float | Tensor:
        return self.alpha[..., None] if isinstance(self.alpha, Tensor) else self.alpha


def covered_mean(old: Tensor, new: Tensor, held: Tensor) -> Tensor:
    """Return the mean over the clients that hold an entry, and the old one where nobody does."""
    count = held.sum(dim=-2)
    return torch.where(count > 0, (held * new).sum(dim=-2) / count.clamp(min=1), old)


def hypergradient(clients: Coefficients, x: Tensor) -> Tensor:
    """∇Φ(x) of the mean over all clients, of shape (..., d)."""
    m = Coefficients(*(t.mean(dim=0) for t in clients))
    y = (m.B * x + m.c) / m.H
    return m.P * x - m.s + m.B / m.H * (m.K * y - m.t)


def held_by(policies: Sequence[Blocks], clients: Coefficients, round: int) -> tuple[Tensor, Tensor]:
    """Return who holds which entry of x and of y: shape (policies, 1, n, d)."""
    n, d = clients.H.shape

    def held(group: str) -> Tensor:
        rows = [p.held(group, d, client, round) for p in policies for client in range(n)]
        return torch.stack(rows).reshape(len(policies), 1, n, d).double()

    return held("x"), held("y")


def difference_from_round(
    step: DiagonalRound, problems: Sequence[Quadratic], policy: Blocks, num_rounds: int, seed: int
) -> float:
    """Run RABO and its vectorised form on the same noise; return how far x and y come apart."""
    algorithm = RABO(
        hypergradient=ConjugateGradient(num_iterations=step.clients.H.shape[1]),
        policy=policy,
        alpha=float(step.alpha),
        beta=step.beta,
        num_inner_steps=step.num_inner_steps,
        seed=seed,
    )
    x, y = (next(iter(part.values()))[None, None] for part in problems[0].start())
    furthest = 0.0
    for state in states(algorithm, problems, num_rounds):
        gaps = (state.x["x"] - x[0, 0], state.y["y"] - y[0, 0])
        furthest = max(furthest, *(float(gap.abs().max()) for gap in gaps))
        held = held_by([policy], step.clients, state.round)
        x, y = step(x, y, *held, _noise(problems, seed, state.round))
    return furthest


def _noise(problems: Sequence[Quadratic], seed: int, round: int) -> Tensor:
    """Draw what the clients of RABO draw in a round."""
    draws = [p.batch(stream(seed, round, i, "batch", "outer")) for i, p in enumerate(problems)]
    return torch.stack([drawn.outer for drawn in draws])
