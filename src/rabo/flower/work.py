"""What may be asked of a client: a fixed table of names. Nothing received is executed."""

import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from rabo.algorithms import ALGORITHMS, Algorithm, curvature, slopes
from rabo.errors import lookup
from rabo.runtimes.base import Reply, Work

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
    methods = (getattr(algorithm, name) for name in dir(algorithm) if not name.startswith("_"))
    table = {f"train.{PHASES.get(m.__name__, m.__name__)}": m for m in methods if _is_work(m)}
    for module in (curvature, slopes):
        table |= {f"query.{work.__name__}": work for work in _functions(module)}
    return table


def _functions(module: ModuleType) -> Iterator[Callable[..., Any]]:
    for member in vars(module).values():
        if _is_work(member) and member.__module__ == module.__name__:
            yield member


def _is_work(member: Any) -> bool:
    is_function = inspect.isfunction(member) or inspect.ismethod(member)
    return is_function and inspect.signature(member).return_annotation is Reply
