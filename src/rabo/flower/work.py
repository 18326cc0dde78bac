"""What may be asked of a client: work marked by @answers. Nothing received is executed."""

import inspect
from typing import Any

from rabo.algorithms import ALGORITHMS, Algorithm, curvature, slopes
from rabo.errors import lookup
from rabo.exchange.work import Work

PHASES = {"update_inner": "inner", "estimate_outer": "outer"}  # the two of Algorithm 1
WIDTH = "query.width"  # the roll call


def message_type(work: Work) -> str:
    """Name work as a message: a method of the algorithm trains, a function answers a query."""
    name = work.__name__
    return f"train.{PHASES.get(name, name)}" if hasattr(work, "__self__") else f"query.{name}"


def work_for(kind: str, algorithm: Algorithm) -> Work:
    """Look up what a message asks for."""
    return lookup("work", kind, _table(algorithm))


def message_types() -> set[str]:
    """Return all that clients of any registered algorithm can be asked for."""
    return {kind for algorithm in ALGORITHMS.values() for kind in _table(algorithm)}


def _table(algorithm: Any) -> dict[str, Work]:
    shared = [member for module in (curvature, slopes) for member in vars(module).values()]
    methods = (getattr(algorithm, name) for name in dir(algorithm) if not name.startswith("_"))
    table = {f"query.{work.__name__}": work for work in shared if _is_work(work)}
    trained = {PHASES.get(m.__name__, m.__name__): m for m in methods if _is_work(m)}
    return table | {f"train.{name}": work for name, work in trained.items()}


def _is_work(member: Any) -> bool:
    return inspect.isroutine(member) and hasattr(member, "answer")
