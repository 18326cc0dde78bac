"""Published algorithms, one per file."""

from rabo.algorithms.aggitd import AggITD
from rabo.algorithms.base import Algorithm, Cohort, State
from rabo.algorithms.fedavg import FedAvg
from rabo.algorithms.fedbio import FedBiO
from rabo.algorithms.fedbioacc import FedBiOAcc
from rabo.algorithms.fedmbo import FedMBO
from rabo.algorithms.fednest import FedNest
from rabo.algorithms.inner import StepSizeWarning
from rabo.algorithms.rabo import RABO
from rabo.algorithms.rafbo import RAFBO
from rabo.algorithms.shrofbo import ShroFBO
from rabo.algorithms.simfbo import SimFBO
from rabo.algorithms.steps import Adam, Cosine, Descent

ALGORITHMS = {
    "rabo": RABO,
    "rafbo": RAFBO,
    "fednest": FedNest,
    "fedmbo": FedMBO,
    "aggitd": AggITD,
    "simfbo": SimFBO,
    "shrofbo": ShroFBO,
    "fedbio": FedBiO,
    "fedbioacc": FedBiOAcc,
    "fedavg": FedAvg,
}

__all__ = [
    "ALGORITHMS",
    "RABO",
    "RAFBO",
    "Adam",
    "AggITD",
    "Algorithm",
    "Cohort",
    "Cosine",
    "Descent",
    "FedAvg",
    "FedBiO",
    "FedBiOAcc",
    "FedMBO",
    "FedNest",
    "ShroFBO",
    "SimFBO",
    "State",
    "StepSizeWarning",
]
