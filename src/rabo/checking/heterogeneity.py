"""The mean of local hypergradients against the global one (erratum 6)."""

import torch

from rabo.checking.implicit import compare, flat, solve
from rabo.checking.measured import Measured
from rabo.checking.report import Comparison, Finding

ALIKE = 0.9  # cosine from which local Hessians are good enough
LENGTHS = (2 / 3, 3 / 2)


def check_heterogeneity(m: Measured) -> Measured:
    """Let each client invert its own Hessian; compare the mean with the global solution."""
    name = "local / global"
    truth = m.hypergradient
    if truth is None or m.direct_slope is None:
        return m
    if m.own.copies > 1 or len(m.here) == 1:
        reason = "one client" if m.own.copies == 1 else "each task trains a separate y"
        return m.plus(Finding(name, f"not compared: {reason}", "skipped"))
    total = torch.zeros_like(truth)
    for i, point in enumerate(m.here.each()):
        system = point.system(m.has_second_order)
        v = solve(system, m.hessians[i] if m.hessians else None, m.clock)
        total += flat(system.pull_back(v)) / len(m.here)
    local = compare(total, truth)
    direct = compare(m.direct_slope, truth)
    rows = _row(name, local), _plain("∇_x f / global", direct)
    return m.plus(*rows, local=local, direct=direct)


def biased(local: Comparison | None) -> bool:
    """Say whether clients differ too much for local Hessians."""
    if local is None:
        return False
    return local.cosine < ALIKE or not LENGTHS[0] <= local.length <= LENGTHS[1]


def _plain(name: str, found: Comparison) -> Finding:
    return Finding(name, f"cosine {found.cosine:.3f}, length {found.length:.2f}")


def _row(name: str, found: Comparison) -> Finding:
    row = _plain(name, found)
    if not biased(found):
        return row
    advice = "clients differ: the mean of local hypergradients is biased, so solve globally"
    return row._replace(verdict="warning", advice=advice)
