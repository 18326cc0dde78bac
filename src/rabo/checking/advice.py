"""The method, estimator and step sizes to start with."""

from collections.abc import Mapping
from math import ceil, log, sqrt
from typing import Any

from rabo.algorithms.steps import Adam
from rabo.checking.estimators import ACCURATE
from rabo.checking.heterogeneity import biased
from rabo.checking.measured import Measured
from rabo.checking.report import Finding
from rabo.tree import flatten, leaves

WANTED = 0.05  # relative error of the implicit solution
MOST_ITERATIONS = 50
ALPHA = "with Adam, the default, an entry of x moves by about alpha in a round"
ESTIMATOR = {True: "conjugate-gradient", False: "directional-difference"}
SMALLEST_ALPHA, LARGEST_ALPHA = Adam.default_size, 0.1
BOUNDS = f"at least {SMALLEST_ALPHA:g} and at most {LARGEST_ALPHA:g}"


def advise(m: Measured) -> Measured:
    """Choose options for `rabo.solve` from everything measured."""
    name = "start with"
    if m.fails:
        return m.plus(Finding(name, "a problem that passes", "skipped", "fix the failing checks"))
    algorithm, own, reason = _method(m)
    alpha, why = _alpha(m)
    options = {"algorithm": algorithm, **own, "alpha": alpha}
    shown = ", ".join(f"{k}={v!r}" for k, v in options.items())
    rows = [
        Finding(name, f"rabo.solve(clients, {shown})", "ok", reason),
        Finding("outer step size", f"alpha = {alpha:g}: {why}", "ok", ALPHA),
    ]
    beta = None
    if m.largest_curvature:
        beta = 1 / (2 * m.largest_curvature)
        advice = "beta='auto', the default, follows it as x moves"
        rows.append(Finding("inner step size", f"beta = {beta:.3g}: 1/(2·curvature)", "ok", advice))
    return m.plus(*rows, options=options, beta=beta)


def _alpha(m: Measured) -> tuple[float, str]:
    """Return a tenth of the typical entry of x, within bounds, and the reason."""
    size = float(flatten(leaves(m.own.x)).double().square().mean().sqrt())
    if not size:
        return SMALLEST_ALPHA, "x starts at zero; weights need 0.01, logarithms and penalties 0.1"
    alpha = min(max(size / 10, SMALLEST_ALPHA), LARGEST_ALPHA)
    return float(f"{alpha:.1g}"), f"a tenth of x (root mean square {size:.2g}), {BOUNDS}"


def _method(m: Measured) -> tuple[str, Mapping[str, Any], str]:
    """Return an algorithm, its options and the reason."""
    differs, is_deep = biased(m.local), m.is_convex is False
    single = "simrabo" if m.has_second_order else "simrafbo"
    if (differs or is_deep) and m.own.copies == 1:
        why = "clients differ" if differs else "g is not convex in y"
        return single, {}, f"{why}: one global v without local inverses"
    algorithm = "rabo" if m.has_second_order else "rafbo"
    options: dict[str, Any] = {"hessian": "global"} if differs else {}
    estimator = _estimator(m, is_deep)
    if estimator:
        options["hypergradient"] = estimator
    if differs:
        reason = "clients differ: the global Hessian removes the bias of local inverses"
    elif is_deep:
        reason = "g is not convex in y: damping makes the system solvable"
    else:
        reason = "local Hessians are close to the global one" if m.local else "the default method"
    return algorithm, options, reason


def _estimator(m: Measured, is_deep: bool) -> Mapping[str, Any]:
    """Return estimator options if the defaults are too inaccurate."""
    name = ESTIMATOR[m.has_second_order]
    if is_deep:
        return {"name": name, "damping": "auto"}
    found = m.estimators.get(name)
    if found is None or found.error <= ACCURATE or not m.spectra:
        return {}
    condition = min(max(s.condition for s in m.spectra), 1e12)
    needed = ceil(sqrt(condition) / 2 * log(2 / WANTED))
    return {"name": name, "num_iterations": max(11, min(needed, MOST_ITERATIONS))}
