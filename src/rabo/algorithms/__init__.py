"""Published algorithms, one per file."""

from rabo.algorithms.base import Algorithm, Cohort, State
from rabo.algorithms.dist_maml import DistMAML
from rabo.algorithms.dist_protonet import DistProtoNet
from rabo.algorithms.fedavg import FedAvg
from rabo.algorithms.fedrolex import FedRolex
from rabo.algorithms.fiarse import FIARSE, StructuredFIARSE
from rabo.algorithms.inner import StepSizeWarning
from rabo.algorithms.oap import OAP, StructuredOAP
from rabo.algorithms.rabo import RABO
from rabo.algorithms.rafbo import RAFBO
from rabo.algorithms.single_level import SingleLevel
from rabo.algorithms.static import HeteroFL
from rabo.algorithms.steps import Adam, Cosine, Descent

ALGORITHMS = {
    "rabo": RABO,
    "rafbo": RAFBO,
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
    "Algorithm",
    "Cohort",
    "Cosine",
    "Descent",
    "DistMAML",
    "DistProtoNet",
    "FedAvg",
    "FedRolex",
    "HeteroFL",
    "State",
    "StepSizeWarning",
    "StructuredFIARSE",
    "StructuredOAP",
]
