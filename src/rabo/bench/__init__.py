"""What things cost: ratios measured in one run, one question per file."""

from collections.abc import Callable
from typing import NamedTuple

from rabo.bench import clients, estimators, hypergradients, memory, rounds, runtimes
from rabo.bench.machine import Machine
from rabo.bench.report import Finding
from rabo.bench.timing import Setting


class Benchmark(NamedTuple):
    measure: Callable[[Setting, Machine], Finding]
    minutes: int  # of one core, about


BENCHMARKS = {
    "hypergradients": Benchmark(hypergradients.measure, 1),
    "estimators": Benchmark(estimators.measure, 1),
    "rounds": Benchmark(rounds.measure, 2),
    "runtimes": Benchmark(runtimes.measure, 2),
    "clients": Benchmark(clients.measure, 3),
    "memory": Benchmark(memory.measure, 1),
}

__all__ = ["BENCHMARKS", "Benchmark", "Finding", "Machine", "Setting"]
