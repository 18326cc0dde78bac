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

__all__ = ["BENCHMARKS", "Finding", "Machine", "Setting"]
