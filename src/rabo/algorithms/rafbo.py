"""RABO with a second-order-free hypergradient (Algorithm 1 with Algorithm 2)."""

from dataclasses import dataclass, field
from typing import ClassVar

from rabo.algorithms.rabo import RABO
from rabo.hypergradients import DirectionalDifference, HypergradientEstimator


@dataclass(frozen=True, kw_only=True)
class RAFBO(RABO):
    """RABO whose clients take no second derivative.

    Departs from Algorithm 2, which is wrong in sign and lacks the inverse Hessian; see
    `CoordinateDifference` for its corrected form.
    """

    second_order: ClassVar[bool] = False

    hypergradient: HypergradientEstimator = field(default_factory=DirectionalDifference)
