"""Published algorithms, one per file."""

from rabo.algorithms.aggitd import AggITD
from rabo.algorithms.base import Algorithm, Cohort, State
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
from rabo.algorithms.single_level import SingleLevel
from rabo.algorithms.static import HeteroFL
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
    "dist-protonet": DistProtoNet,
    "dist-maml": DistMAML,
    "static": HeteroFL,
    "fedrolex": FedRolex,
    "oap": OAP,
    "oap-structured": StructuredOAP,
    "fiarse": FIARSE,
    "fiarse-structured": StructuredFIARSE,
}
SINGLE_LEVEL = tuple(n for n, kind in ALGORITHMS.items() if issubclass(kind, SingleLevel))

__all__ = [
    "ALGORITHMS",
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
]
