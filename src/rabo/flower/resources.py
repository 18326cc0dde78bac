"""What a machine says it has, in its node config, and the width it therefore asks for."""

import time
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import psutil
import torch
from flwr.app import ConfigRecord, RecordDict

from rabo.algorithms import Algorithm
from rabo.exchange.budgets import Absent, Budget, Now, check_capacity, parse_amount, width_for
from rabo.exchange.cost import Cost
from rabo.federation.solve import Client, Federation
from rabo.problems.bilevel import BilevelProblem

AUTO = "auto"
SECONDS = 10.0  # of work in a round, unless the node says otherwise
SHARE = 0.5  # of the free memory; the rest is left to others
EFFICIENCY = 0.25  # of the speed of a matrix product that the layers of a network reach
CALIBRATION = 0.05  # seconds


def ask_width(
    node: Mapping[str, Any],
    otherwise: Now,
    problem: BilevelProblem,
    algorithm: Algorithm,
    kept: RecordDict,
) -> float | Absent:
    """Return the widest submodel that fits what the node has now.

    Its config may give `capacity` (a width, or "auto"), `memory`, `multiply-adds`, `traffic` and,
    for "auto", `seconds`; it is `otherwise` where it gives none of them. What rounds cost at each
    width is measured once, and kept on the node.
    """
    limits, most = _limits(node, otherwise)
    if not limits:
        return most
    federation = Federation([Client(problem)], algorithm)

    def cost_at(width: float) -> Cost:
        costs = kept.config_records["costs"] if "costs" in kept else ConfigRecord()
        if str(width) not in costs:
            cost = federation.cost_at(0, width)
            costs[str(width)] = [int(cost._replace(seconds=0)[i]) for i in range(len(cost))]
            kept["costs"] = costs
        return Cost(*costs[str(width)])  # type: ignore[misc]

    width = width_for(Budget(**limits), cost_at)
    return width if isinstance(width, Absent) else min(width, most)


def _limits(node: Mapping[str, Any], otherwise: Now) -> tuple[dict[str, int], float]:
    """Return limits and the largest width."""
    given = {"memory", "multiply-adds", "traffic"} & node.keys()
    limits = {name.replace("-", "_"): parse_amount(node[name]) for name in given}
    capacity = node.get("capacity", 1.0 if limits else None)
    if capacity is None:
        return (otherwise.limits(), 1.0) if isinstance(otherwise, Budget) else ({}, otherwise)
    if capacity != AUTO:
        return limits, check_capacity(float(Fraction(str(capacity))))
    seconds = float(node.get("seconds", SECONDS))
    found = {
        "memory": int(SHARE * psutil.virtual_memory().available),
        "multiply_adds": int(EFFICIENCY * seconds * speed()),
    }
    return {name: min(n, limits.get(name, n)) for name, n in found.items()} | {
        name: n for name, n in limits.items() if name not in found
    }, 1.0


def speed() -> float:
    """Measure how many multiply-adds this machine does in a second, now."""
    matrix = torch.ones(256, 256)
    start, times = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < CALIBRATION:
        torch.mm(matrix, matrix)
        times += 1
    return times * len(matrix) ** 3 / spent
