"""Loss tuning on long-tailed CIFAR-10: Section 5.2 of the paper."""

from collections.abc import Mapping
from typing import Any

from experiments.grid import Grid, Method, Setting
from experiments.grids.tuned import LOSS

BASE: Mapping[str, Any] = {
    "task": "loss-tuning",
    "task_options": {"dataset": "cifar10"},
    "clients": 10,
    "capacities": "1/2",
    "rounds": 100,
}


def full(label: str, algorithm: str) -> Method:
    """Return a method in which every client trains the full model."""
    return Method(label=label, run={"algorithm": algorithm, "capacities": "1"})


def submodels(label: str, algorithm: str, tuned_as: str) -> Method:
    """Return a method on submodels, with the options that a full-model method was tuned to."""
    return Method(label=label, run={"algorithm": algorithm}, tuned_as=tuned_as)


METHODS: Mapping[str, Method] = {
    "fedavg": full("FedAvg, untuned loss (full)", "fedavg"),
    "fedmbo": full("FedMBO (full)", "fedmbo"),
    "static": submodels("Static", "static", "fedavg"),
    "oap": submodels("OAP (channels)", "oap-structured", "fedavg"),
    "fedrolex": submodels("FedRolex", "fedrolex", "fedavg"),
    "fiarse": submodels("FIARSE (channels)", "fiarse-structured", "fedavg"),
    "rabo": submodels("RABO", "rabo", "fedmbo"),
    "rafbo": submodels("RAFBO", "rafbo", "fedmbo"),
}
LOSS_TUNING = Grid(
    name="figure-tuning",
    title="Loss tuning on long-tailed CIFAR-10",
    base=BASE,
    settings={"cifar-10": Setting(label="long-tailed CIFAR-10")},
    methods=METHODS,
    tuned=LOSS,
)
