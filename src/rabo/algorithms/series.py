"""A Neumann series of random length: (N/L)·Π (I − H/L)·∇_y f has the truncated sum as its mean."""

from dataclasses import dataclass

import torch

from rabo.algorithms.inner import Calibrated
from rabo.exchange.state import Cuts, State
from rabo.exchange.work import Runtime
from rabo.seeding import stream


@dataclass(frozen=True, kw_only=True)
class RandomSeries(Calibrated):
    """N and L of [∇²_yy g]⁻¹ ≈ (1/L) Σ_{k<N} (I − ∇²_yy g/L)^k."""

    num_terms: int = 10  # N
    smoothness: float | None = None  # L of g in y; None: l_{g,1} as measured

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_terms < 1:
            raise ValueError(f"num_terms must be at least 1, got {self.num_terms}")
        if self.smoothness is not None and not self.smoothness > 0:
            raise ValueError(f"smoothness must be positive or None, got {self.smoothness}")

    @property
    def follows_curvature(self) -> bool:
        """Whether β or L depends on the curvature."""
        return self.adapts_beta or self.smoothness is None

    def num_factors(self, round: int, chain: int = 0) -> int:
        """Draw N' ~ U{0..N−1}, the number of factors of a chain in a round."""
        generator = stream(self.seed, round, chain, "factors")
        return int(torch.randint(self.num_terms, (), generator=generator))

    def enlarged(self, L: float, seen: float) -> tuple[float, float]:
        """Return max(L, seen) and the factor that rescales the series; a given smoothness stays."""
        if self.smoothness is not None or seen <= L:
            return L, 1.0
        return seen, L / seen

    def with_step_sizes(self, state: State, cuts: Cuts, runtime: Runtime) -> tuple[State, float]:
        """Set β and return L."""
        state = self.with_beta(state, cuts, runtime)
        if self.smoothness is not None:
            return state, self.smoothness
        if self.beta != "auto":  # else it has just been measured
            state = self.with_curvature(state, cuts, runtime)
        return state, state.scalars["largest_curvature"]
