"""Published algorithms, one per file."""

from rabo.algorithms.base import Algorithm, Cohort, State
from rabo.algorithms.rabo import RABO, StepSizeWarning
from rabo.algorithms.rafbo import RAFBO

ALGORITHMS = {"rabo": RABO, "rafbo": RAFBO}

__all__ = ["ALGORITHMS", "RABO", "RAFBO", "Algorithm", "Cohort", "State", "StepSizeWarning"]
