"""The error of every estimator at its defaults."""

import torch

from rabo.checking.implicit import compare, flat
from rabo.checking.measured import Measured
from rabo.checking.report import Comparison, Finding
from rabo.errors import NonFiniteError
from rabo.hypergradients import ESTIMATORS

SECOND_ORDER = ("conjugate-gradient", "neumann", "unrolled")
LARGEST_X = 200  # entries up to which one gradient per entry of x is affordable
ACCURATE = 0.3  # relative error, at which the cosine is at least .95
MORE = {
    "conjugate-gradient": "num_iterations",
    "neumann": "num_terms",
    "unrolled": "num_steps",
    "coordinate-difference": "num_iterations",
    "directional-difference": "num_iterations",
}


def check_estimators(m: Measured) -> Measured:
    """Run estimators at the inner minimum of all clients, in the precision of the problem."""
    truth, directions, slopes = m.hypergradient, m.directions, m.slopes
    if truth is None or directions is None or slopes is None:
        return m
    for name in MORE:
        m.clock.tick()
        if name in SECOND_ORDER and not m.has_second_order:
            m = m.plus(Finding(name, "needs second derivatives", "skipped"))
            continue
        if name == "coordinate-difference" and len(truth) > LARGEST_X:
            result = f"one gradient for each of {len(truth):,} entries of x"
            m = m.plus(Finding(name, result, "skipped"))
            continue
        value = _estimate(m, name)
        if value is None:
            m = m.plus(Finding(name, "NaN or infinite", "warning", _advice(m, name)))
            continue
        if m.hessians:
            found = compare(value, truth)
        else:
            found = compare(directions.double() @ value, slopes)
        m = m.plus(_row(m, name, found), estimators={**m.estimators, name: found})
    return m


def _estimate(m: Measured, name: str) -> torch.Tensor | None:
    point = m.own if m.own.copies == 1 else m.own.first()
    point = point.at_y(m.here.flat_y)
    try:
        return flat(ESTIMATORS[name]()(point.problem, point.x, point.y, point.batch).value)
    except NonFiniteError:
        return None


def _row(m: Measured, name: str, found: Comparison) -> Finding:
    row = Finding(name, f"error {found.error:.2g}, cosine {found.cosine:.3f}")
    if found.error <= ACCURATE:
        return row
    return row._replace(verdict="warning", advice=_advice(m, name))


def _advice(m: Measured, name: str) -> str:
    if not m.is_convex and name in ("conjugate-gradient", "directional-difference"):
        return "damping='auto' for the negative curvature"
    return f"raise {MORE[name]}, or curve g more in y"
