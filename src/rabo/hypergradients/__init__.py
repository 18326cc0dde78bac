"""Estimators of the hypergradient, one per file."""

from typing import Any

from rabo.hypergradients.conjugate_gradient import ConjugateGradient
from rabo.hypergradients.coordinate_difference import CoordinateDifference
from rabo.hypergradients.directional_difference import DirectionalDifference
from rabo.hypergradients.linearisation import Estimate, HypergradientEstimator
from rabo.hypergradients.neumann import Neumann
from rabo.hypergradients.unrolled import Unrolled

ESTIMATORS: dict[str, type[Any]] = {
    "conjugate-gradient": ConjugateGradient,
    "neumann": Neumann,
    "unrolled": Unrolled,
    "coordinate-difference": CoordinateDifference,
    "directional-difference": DirectionalDifference,
}

__all__ = [
    "ESTIMATORS",
    "ConjugateGradient",
    "CoordinateDifference",
    "DirectionalDifference",
    "Estimate",
    "HypergradientEstimator",
    "Neumann",
    "Unrolled",
]
