"""Estimators of the hypergradient, one per file."""

from rabo.hypergradients.conjugate_gradient import ConjugateGradient
from rabo.hypergradients.coordinate_difference import (
    CoordinateDifference,
    LiteralCoordinateDifference,
)
from rabo.hypergradients.directional_difference import DirectionalDifference
from rabo.hypergradients.linearisation import Estimate, HypergradientEstimator
from rabo.hypergradients.neumann import Neumann
from rabo.hypergradients.unrolled import Unrolled

ESTIMATORS = {
    "conjugate-gradient": ConjugateGradient,
    "neumann": Neumann,
    "unrolled": Unrolled,
    "coordinate-difference": CoordinateDifference,
    "literal-coordinate-difference": LiteralCoordinateDifference,
    "directional-difference": DirectionalDifference,
}

__all__ = [
    "ESTIMATORS",
    "ConjugateGradient",
    "CoordinateDifference",
    "DirectionalDifference",
    "Estimate",
    "HypergradientEstimator",
    "LiteralCoordinateDifference",
    "Neumann",
    "Unrolled",
]
