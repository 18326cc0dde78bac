"""Published algorithms, one per file."""

from rabo.algorithms.base import Algorithm, Cohort, State
from rabo.algorithms.fedavg import FedAvg
from rabo.algorithms.inner import StepSizeWarning
from rabo.algorithms.rabo import RABO
from rabo.algorithms.rafbo import RAFBO
from rabo.algorithms.steps import Adam, Cosine, Descent

ALGORITHMS = {"rabo": RABO, "rafbo": RAFBO, "fedavg": FedAvg}

__all__ = [
    "ALGORITHMS",
    "RABO",
    "RAFBO",
    "Adam",
    "Algorithm",
    "Cohort",
    "Cosine",
    "Descent",
    "FedAvg",
    "State",
    "StepSizeWarning",
]
