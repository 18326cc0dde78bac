"""The outer level: how x moves along an averaged slope, and when it begins to."""

from dataclasses import dataclass, field, replace

import torch

from rabo.algorithms.inner import Calibrated
from rabo.algorithms.step_limit import Limit, check_limit, limited
from rabo.algorithms.steps import Descent, OuterStep, StepSize, check_step, size_at
from rabo.exchange.covering import Covered
from rabo.exchange.state import DISAGREEMENT, HYPERGRADIENT_NORM, State


@dataclass(frozen=True, kw_only=True)
class OuterLevel(Calibrated):
    """Steps on x with step size α: a number, or a function of the round."""

    alpha: StepSize | None = None  # None: that of the outer step (descent .1, Adam .01)
    outer_step: OuterStep = field(default_factory=Descent)
    max_outer_step: Limit = "auto"  # longest step on x: a share of ‖x‖; see step_limit.py
    warm_up: int = 0  # rounds before x moves

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha is not None:
            check_step("alpha", self.alpha)
        if not hasattr(self.outer_step, "default_size"):
            raise ValueError(
                f"outer_step must be 'adam', 'descent' or an OuterStep, got {self.outer_step!r}; "
                "the size of the step is alpha"
            )
        check_limit(self.max_outer_step)
        if self.warm_up < 0:
            raise ValueError(f"warm_up must be at least 0, got {self.warm_up}")

    def alpha_in(self, state: State) -> float:
        """Return α in the round that a state begins."""
        alpha = self.outer_step.default_size if self.alpha is None else self.alpha
        return size_at("alpha", alpha, state.round)

    def move_outer(self, state: State, slope: Covered, *, scale: float = 1.0) -> State:
        """Step on x by α·scale; entries nobody covered stay. Notes how long the slope is."""
        size = self.alpha_in(state) * (1.0 if self.outer_step.is_scale_free else scale)
        x, memory = self.outer_step(state.x, slope, size, state.vectors)
        norm, disagreement = torch.stack([slope.norm(), slope.disagreement()]).tolist()
        scalars = {
            **state.scalars,
            HYPERGRADIENT_NORM: scale * norm,
            DISAGREEMENT: disagreement,
        }
        if self.max_outer_step is not None:
            x, scalars = limited(state.x, x, self.max_outer_step, scalars)
        return replace(state, x=x, vectors={**state.vectors, **memory}, scalars=scalars)
