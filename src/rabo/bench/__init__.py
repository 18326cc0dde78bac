"""What things cost: ratios measured in one run, one question per file."""

from collections.abc import Callable

from rabo.bench import clients, estimators, hypergradients, memory, rounds, runtimes
from rabo.bench.machine import Machine
from rabo.bench.report import Finding
from rabo.bench.timing import Setting

BENCHMARKS: dict[str, Callable[[Setting, Machine], Finding]] = {
    "hypergradients": hypergradients.measure,
    "estimators": estimators.measure,
    "rounds": rounds.measure,
    "runtimes": runtimes.measure,
    "clients": clients.measure,
    "memory": memory.measure,
}
MINUTES = {  # of one core, about
    "hypergradients": 2,
    "estimators": 4,
    "rounds": 2,
    "runtimes": 2,
    "clients": 6,
    "memory": 2,
}

__all__ = ["BENCHMARKS", "MINUTES", "Finding", "Machine", "Setting"]
