"""What every estimator costs and how far it is off, by the number K of its iterations.

Costs are over those of ∇f alone, the least that a step on x can take. Errors are relative to a
dense solve in float64, at a y near the inner optimum.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.hypergradients import dense, flat, ours
from benchmarks.parts.machine import Machine
from benchmarks.parts.peers import Work, fresh
from benchmarks.parts.problems import Case, few_shot, logistic
from benchmarks.parts.report import Finding
from benchmarks.parts.timing import Setting, interleave, ratio
from rabo.exchange.cost import measure as meter
from rabo.hypergradients import (
    ConjugateGradient,
    CoordinateDifference,
    DirectionalDifference,
    Neumann,
    Unrolled,
)

DIRECT = "∇_x f alone"
DEPTHS = (1, 3, 10, 30)


def measure(setting: Setting, machine: Machine) -> Finding:
    """Go deeper and deeper on problems A and B of the benchmark `hypergradients`."""
    make_a, make_b = partial(logistic, 200), partial(few_shot)
    if setting.quick:
        make_a, make_b = partial(logistic, 20), partial(few_shot, 4)
    rows = [*compare(make_a, setting, True), *compare(make_b, setting, False)]
    notes = [
        "'x time', 'x multiply-adds' and 'x memory' are over ∇f, of which ∇_x f is a part.",
        "CoordinateDifference takes a gradient per coordinate of x: not on B, which has too many.",
    ]
    return Finding(rows, (), notes)


def compare(make: Callable[..., Case], setting: Setting, few_weights: bool) -> list[dict[str, Any]]:
    """Measure all estimators at all depths on one problem."""
    case = make(device=setting.device)
    exact = make(device=setting.device, dtype=torch.float64)
    x, y = ([t.double() for t in tensors] for tensors in fresh(case))
    truth = flat(dense(exact.inner, exact.outer, x, y))
    work = {(DIRECT, 0): partial(direct, case), **contestants(case, few_weights)}
    times = interleave({str(key): one for key, one in work.items()}, setting, 9)
    costs = {key: meter(one)[1] for key, one in work.items()}
    bar, least = times[str((DIRECT, 0))], costs[DIRECT, 0]
    return [
        {
            "problem": case.name,
            "estimator": name,
            "K": depth,
            "error": float((flat(one()).double() - truth).norm() / truth.norm()),
            "x time": ratio(times[str((name, depth))], bar),
            "x multiply-adds": costs[name, depth].multiply_adds / least.multiply_adds,
            "x memory": costs[name, depth].peak_memory_bytes / least.peak_memory_bytes,
        }
        for (name, depth), one in work.items()
    ]


def contestants(case: Case, few_weights: bool) -> dict[tuple[str, int], Work]:
    """Return every estimator at every depth; those by coordinates where weights are few."""
    kinds: dict[str, Callable[[int], Any]] = {
        "ConjugateGradient": lambda k: ConjugateGradient(num_iterations=k),
        "DirectionalDifference": lambda k: DirectionalDifference(num_iterations=k),
        "Neumann": lambda k: Neumann(num_terms=k, step_size=case.step),
        "Unrolled": lambda k: Unrolled(num_steps=k, step_size=case.step),
    }
    if few_weights:
        kinds["CoordinateDifference"] = lambda k: CoordinateDifference(num_iterations=k)
    return {(name, k): ours(case, make(k)) for name, make in kinds.items() for k in DEPTHS}


def direct(case: Case) -> list[torch.Tensor]:
    """Return ∇_x f, with ∇_y f computed beside it and no implicit term: nothing solved."""
    x, y = fresh(case)
    slopes = torch.autograd.grad(case.outer(x, y), [*x, *y], materialize_grads=True)
    return list(slopes[: len(x)])
