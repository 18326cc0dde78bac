"""The outer level: how x moves along an averaged slope, and when it begins to."""

from dataclasses import dataclass, field, replace

import torch

from rabo.algorithms.base import HYPERGRADIENT_NORM, State
from rabo.algorithms.inner import Calibrated
from rabo.algorithms.steps import Descent, OuterStep
from rabo.covering import Covered


@dataclass(frozen=True, kw_only=True)
class OuterLevel(Calibrated):
    """Steps on x with step size α."""

    alpha: float = 0.1
    outer_step: OuterStep = field(default_factory=Descent)
    warm_up: int = 0  # rounds before x moves

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.alpha > 0:
            raise ValueError(f"alpha must be positive, got {self.alpha}")
        if self.warm_up < 0:
            raise ValueError(f"warm_up must be at least 0, got {self.warm_up}")

    def move_outer(self, state: State, slope: Covered, size: float) -> State:
        """Step on x; entries nobody covered stay. Notes how long the slope is, per unit of α."""
        x, memory = self.outer_step(state.x, slope, size, state.vectors)
        norm = float(torch.linalg.vector_norm(slope.flat_mean())) * size / self.alpha
        scalars = {**state.scalars, HYPERGRADIENT_NORM: norm}
        return replace(state, x=x, vectors={**state.vectors, **memory}, scalars=scalars)
