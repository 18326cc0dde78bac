"""Published algorithms, one per file."""

from typing import Any

from rabo.algorithms.aggitd import AggITD
from rabo.algorithms.dist_maml import DistMAML
from rabo.algorithms.dist_protonet import DistProtoNet
from rabo.algorithms.fedavg import FedAvg
from rabo.algorithms.fedbio import FedBiO
from rabo.algorithms.fedbioacc import FedBiOAcc
from rabo.algorithms.fedmbo import FedMBO
from rabo.algorithms.fednest import FedNest
from rabo.algorithms.fedrolex import FedRolex
from rabo.algorithms.fiarse import FIARSE, StructuredFIARSE
from rabo.algorithms.inner import StepSizeWarning
from rabo.algorithms.oap import OAP, StructuredOAP
from rabo.algorithms.rabo import RABO
from rabo.algorithms.rafbo import RAFBO
from rabo.algorithms.shrofbo import ShroFBO
from rabo.algorithms.simfbo import SimFBO
from rabo.algorithms.simrabo import SimRABO, SimRAFBO
from rabo.algorithms.single_level import SingleLevel
from rabo.algorithms.static import HeteroFL
from rabo.algorithms.steps import Adam, Cosine, Descent
from rabo.errors import lookup
from rabo.exchange.state import Algorithm, Cohort, State

ALGORITHMS = {
    "rabo": RABO,
    "rafbo": RAFBO,
    "fednest": FedNest,
    "fedmbo": FedMBO,
    "aggitd": AggITD,
    "simfbo": SimFBO,
    "shrofbo": ShroFBO,
    "simrabo": SimRABO,
    "simrafbo": SimRAFBO,
    "fedbio": FedBiO,
    "fedbioacc": FedBiOAcc,
    "fedavg": FedAvg,
    "dist-protonet": DistProtoNet,
    "dist-maml": DistMAML,
    "static": HeteroFL,
    "fedrolex": FedRolex,
    "oap": OAP,
    "oap-structured": StructuredOAP,
    "fiarse": FIARSE,
    "fiarse-structured": StructuredFIARSE,
}
ALIASES = {"heterofl": "static"}  # names of the literature, not listed again
SINGLE_LEVEL = tuple(n for n, kind in ALGORITHMS.items() if issubclass(kind, SingleLevel))


def canonical(name: str) -> str:
    """Return the registered name of an algorithm: an alias stands for another name."""
    return ALIASES.get(name, name)


def find_algorithm(name: str) -> type[Any]:
    """Return the class of a name or alias, or raise with the closest known name."""
    return lookup("algorithm", canonical(name), ALGORITHMS)


__all__ = [
    "ALGORITHMS",
    "ALIASES",
    "FIARSE",
    "OAP",
    "RABO",
    "RAFBO",
    "SINGLE_LEVEL",
    "Adam",
    "AggITD",
    "Algorithm",
    "Cohort",
    "Cosine",
    "Descent",
    "DistMAML",
    "DistProtoNet",
    "FedAvg",
    "FedBiO",
    "FedBiOAcc",
    "FedMBO",
    "FedNest",
    "FedRolex",
    "HeteroFL",
    "ShroFBO",
    "SimFBO",
    "State",
    "StepSizeWarning",
    "StructuredFIARSE",
    "StructuredOAP",
    "canonical",
    "find_algorithm",
]
