"""The benchmarks by name: the question that each answers, and how long it takes."""

from typing import NamedTuple


class Benchmark(NamedTuple):
    """A line of the list that `python -m benchmarks` prints."""

    question: str
    minutes: float | None  # about, of one core or of one H200; None: depends on the run it reads


# `python -m benchmarks NAME ...` with the options of parts/measured.py; `all` runs every one
MEASURED = {
    "hypergradients": Benchmark("hypergradients against plain autograd and other libraries", 1),
    "estimators": Benchmark("cost and error of each estimator, by its number of iterations", 1),
    "rounds": Benchmark("rounds of RABO against the full model, and by width", 2),
    "runtimes": Benchmark("plain, recorded and grouped rounds, and how far apart they are", 2),
    "clients": Benchmark("time and memory of rounds with 10 to 10,000 clients", 3),
    "memory": Benchmark("RAFBO against RABO where y is a deep network", 1),
}
# `python -m benchmarks NAME ARGUMENTS`
SCRIPTS = {
    "adaptation": Benchmark("rounds of Dist-MAML on a GPU, and their kernels", 3),
    "convolutions": Benchmark("convolutions of few channels on a GPU, against torch's", 1),
    "coverage": Benchmark("how many clients have trained each entry of x during a run", None),
    "curves": Benchmark("accuracy of RABO by round on each runtime of a GPU", 0.5),
    "fednest": Benchmark("a round of FedNest against a loop written by hand", 2),
    "flower": Benchmark("seconds that Flower adds to a round", 2),
    "multiply_adds": Benchmark("share of backbone and head in the multiply-adds of a run", None),
    "norms": Benchmark("batch norm of few channels on a CPU, against torch's", 0.5),
    "replays": Benchmark("recordings of a round on a GPU without the round around them", 2),
    "shared_memory": Benchmark("whether recordings that share memory reach the same x", 1),
    "submodels": Benchmark("accuracy of the submodels of a run, each alone", None),
    "untrained": Benchmark("accuracy of Table 1's tasks on untrained backbones", 52),
}
