"""The outer level: how x moves along an averaged slope, and when it begins to."""

from dataclasses import dataclass, field, replace

import torch

from rabo.algorithms.base import HYPERGRADIENT_NORM, State
from rabo.algorithms.inner import Calibrated
from rabo.algorithms.steps import Descent, OuterStep, StepSize, check_step, size_at
from rabo.covering import Covered


@dataclass(frozen=True, kw_only=True)
class OuterLevel(Calibrated):
    """Steps on x with step size α: a number, or a function of the round."""

    alpha: StepSize = 0.1
    outer_step: OuterStep = field(default_factory=Descent)
    warm_up: int = 0  # rounds before x moves

    def __post_init__(self) -> None:
        super().__post_init__()
        check_step("alpha", self.alpha)
        if self.warm_up < 0:
            raise ValueError(f"warm_up must be at least 0, got {self.warm_up}")

    def alpha_in(self, state: State) -> float:
        """Return α in the round that a state begins."""
        return size_at("alpha", self.alpha, state.round)

    def move_outer(self, state: State, slope: Covered, *, scale: float = 1.0) -> State:
        """Step on x by α·scale; entries nobody covered stay. Notes how long the slope is."""
        size = scale * self.alpha_in(state)
        x, memory = self.outer_step(state.x, slope, size, state.vectors)
        norm = scale * float(torch.linalg.vector_norm(slope.flat_mean))
        scalars = {**state.scalars, HYPERGRADIENT_NORM: norm}
        return replace(state, x=x, vectors={**state.vectors, **memory}, scalars=scalars)
