"""Federated bilevel optimisation on submodels that fit each client."""

from rabo.aggregation import Aggregate
from rabo.alarms import BiasWarning, DivergenceWarning
from rabo.algorithms import RABO, RAFBO, Adam, Cosine, State, StepSizeWarning
from rabo.bilevel import Batch, BilevelProblem
from rabo.checking import ProblemCheck, ProblemCheckError, check
from rabo.clients import Client, OnDemand
from rabo.errors import CapacityWarning, ClientError, NonFiniteError, UnsupportedModelError
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
    "BiasWarning",
    "BilevelProblem",
    "Budget",
    "CapacityWarning",
    "ChannelRegions",
    "Client",
    "ClientError",
    "ConjugateGradient",
    "CoordinateDifference",
    "Cosine",
    "DirectionalDifference",
    "DivergenceWarning",
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
    "ProblemCheck",
    "ProblemCheckError",
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
    "check",
    "load_model",
    "solve",
]
