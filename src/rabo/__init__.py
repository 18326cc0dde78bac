"""Federated bilevel optimisation on submodels that fit each client."""

from rabo.algorithms import RABO, RAFBO, Adam, Cosine, State, StepSizeWarning
from rabo.checking import ProblemCheck, ProblemCheckError, check
from rabo.errors import CapacityWarning, ClientError, NonFiniteError, UnsupportedModelError
from rabo.exchange.aggregation import Aggregate
from rabo.exchange.budgets import Budget
from rabo.execution import Privacy, Tolerance
from rabo.federation.alarms import BiasWarning, DivergenceWarning
from rabo.federation.clients import Client, OnDemand
from rabo.federation.federation import Federation
from rabo.federation.rounds import Result, Round
from rabo.federation.solve import solve
from rabo.files import load_model
from rabo.hypergradients import (
    ConjugateGradient,
    CoordinateDifference,
    DirectionalDifference,
    Neumann,
    Unrolled,
)
from rabo.problems.bilevel import Batch, BilevelProblem
from rabo.problems.problem import Problem
from rabo.pruning.policies import (
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
