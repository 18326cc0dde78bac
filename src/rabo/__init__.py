"""Federated bilevel optimisation on submodels that fit each client."""

from rabo.aggregation import Aggregate
from rabo.algorithms import RABO, RAFBO, Adam, Cosine, State, StepSizeWarning
from rabo.bilevel import Batch, BilevelProblem
from rabo.clients import Client, OnDemand
from rabo.errors import ClientError, NonFiniteError, UnsupportedModelError
from rabo.export import load_model
from rabo.federation import Federation
from rabo.hypergradients import (
    ConjugateGradient,
    CoordinateDifference,
    DirectionalDifference,
    LiteralCoordinateDifference,
    Neumann,
    Unrolled,
)
from rabo.masks import (
    ChannelRegions,
    Full,
    Importance,
    Magnitude,
    Random,
    Regions,
    Rolling,
    Segments,
    Static,
    Threshold,
)
from rabo.problem import Problem
from rabo.resources import Budget
from rabo.rounds import Result, Round
from rabo.runtimes import Privacy, Tolerance
from rabo.solve import solve

__version__ = "0.1.0"

__all__ = [
    "RABO",
    "RAFBO",
    "Adam",
    "Aggregate",
    "Batch",
    "BilevelProblem",
    "Budget",
    "ChannelRegions",
    "Client",
    "ClientError",
    "ConjugateGradient",
    "CoordinateDifference",
    "Cosine",
    "DirectionalDifference",
    "Federation",
    "Full",
    "Importance",
    "LiteralCoordinateDifference",
    "Magnitude",
    "Neumann",
    "NonFiniteError",
    "OnDemand",
    "Privacy",
    "Problem",
    "Random",
    "Regions",
    "Result",
    "Rolling",
    "Round",
    "Segments",
    "State",
    "Static",
    "StepSizeWarning",
    "Threshold",
    "Tolerance",
    "Unrolled",
    "UnsupportedModelError",
    "load_model",
    "solve",
]
