"""Hypergradients against a plain autograd loop and against other libraries.

The bar is conjugate gradients as a good user writes them: one retained graph of ∇_y g for all
Hessian products and the cross term. Errors are relative to a dense solve in float64.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd import grad

from benchmarks.parts.machine import Machine
from benchmarks.parts.peers import PEERS, Work, fresh
from benchmarks.parts.problems import Case, Loss, few_shot, logistic
from benchmarks.parts.report import Finding, Target
from benchmarks.parts.timing import Setting, interleave, milliseconds, ratio
from rabo.hypergradients import (
    ConjugateGradient,
    CoordinateDifference,
    DirectionalDifference,
    HypergradientEstimator,
    Neumann,
    Unrolled,
)

INSTALL = "pip install --no-deps torchopt optree graphviz betty-ml higher boat-torch"
BAR, OURS = "plain autograd", "rabo ConjugateGradient"
SAME_ERROR = 1.1  # times ours


def measure(setting: Setting, machine: Machine) -> Finding:
    """Compare on problems A and B, and what takes a gradient per coordinate on a smaller A."""
    make_a, make_b = partial(logistic, 40), partial(few_shot, 4)
    if not setting.quick:
        make_a, make_b = partial(logistic), partial(few_shot)
    rows, targets = [], []
    missing = [(name, peer) for name, peer in PEERS.items() if not peer.version]
    for make in (make_a, make_b):
        case = make(device=setting.device)
        work = contestants(case) | {
            name: peer.prepare(case) for name, peer in PEERS.items() if peer.version
        }
        found = compare(make, case, work, setting, 30)
        found[1] |= machine.floors(work[OURS])
        rows += found
        targets += [
            Target(f"{case.name}: rabo over {row['system']}", row["rabo / it"], 1.0)
            for row in found
            if row["system"] in PEERS and row["error"] <= SAME_ERROR * found[1]["error"]
        ]
        rows += [_row(case.name, name, f"{peer.method}; not installed") for name, peer in missing]
    small = partial(logistic, 20 if setting.quick else 200)
    case = small(device=setting.device)._replace(name="A, fewer weights")
    coordinates = {
        BAR: partial(plain, case),
        OURS: ours(case, ConjugateGradient(num_iterations=10)),
        "rabo CoordinateDifference": ours(case, CoordinateDifference(num_iterations=10)),
    }
    rows += compare(small, case, coordinates, setting, 5)
    notes = [
        *([f"To compare with what is not installed: {INSTALL}"] if missing else []),
        "'rabo / it' is the time of rabo's ConjugateGradient over that of the row.",
        "CoordinateDifference takes a gradient per coordinate of x: hence a smaller A, and no B.",
    ]
    return Finding(rows, targets, notes)


def contestants(case: Case) -> dict[str, Work]:
    """The bar, and our estimators with ten iterations, terms or steps."""
    estimators: dict[str, HypergradientEstimator] = {
        OURS: ConjugateGradient(num_iterations=10),
        "rabo DirectionalDifference": DirectionalDifference(num_iterations=10),
        "rabo Neumann": Neumann(num_terms=10, step_size=case.step),
        "rabo Unrolled": Unrolled(num_steps=10, step_size=case.step),
    }
    return {BAR: partial(plain, case)} | {k: ours(case, e) for k, e in estimators.items()}


def ours(case: Case, estimator: HypergradientEstimator) -> Work:
    return lambda: list(estimator(case.problem, case.x, case.y, case.batch).value.values())


def compare(
    make: Callable[..., Case],
    case: Case,
    work: dict[str, Work],
    setting: Setting,
    repeats: int,
) -> list[dict[str, Any]]:
    """Time all in turn, and measure their errors."""
    exact = make(device=setting.device, dtype=torch.float64)
    x, y = ([t.double() for t in tensors] for tensors in fresh(case))
    truth = flat(dense(exact.inner, exact.outer, x, y))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchOpt calls what torch has since moved
        times = interleave(work, setting, repeats)
        found = {name: flat(one()).double() for name, one in work.items()}
    return [
        _row(case.name, name, PEERS[name].method if name in PEERS else "")
        | {
            "version": PEERS[name].version if name in PEERS else "",
            "ms": milliseconds(times[name]),
            "x plain": ratio(times[name], times[BAR]),
            "rabo / it": ratio(times[OURS], times[name]),
            "error": float((found[name] - truth).norm() / truth.norm()),
        }
        for name in work
    ]


def _row(problem: str, system: str, method: str) -> dict[str, Any]:
    columns = ("version", "ms", "x plain", "rabo / it", "error")
    floors = ("operations floor ms", "bytes floor ms")
    about = {"problem": problem, "system": system, "method": method}
    return about | dict.fromkeys((*columns, *floors))


def plain(case: Case, num_iterations: int = 10) -> list[Tensor]:
    """∇_x f − ∇²_xy g·v with ∇²_yy g·v = ∇_y f, by conjugate gradients on torch.autograd."""
    x, y = fresh(case)
    slope = grad(case.inner(x, y), y, create_graph=True)
    outer_slope = grad(case.outer(x, y), y + x, allow_unused=True)
    r, direct = list(outer_slope[: len(y)]), outer_slope[len(y) :]
    v, p, rr = [torch.zeros_like(t) for t in r], r, dot(r, r)
    for _ in range(num_iterations):
        hp = grad(slope, y, p, retain_graph=True)
        step = rr / dot(p, hp)
        v = [a + step * b for a, b in zip(v, p, strict=True)]
        r = [a - step * b for a, b in zip(r, hp, strict=True)]
        rr, last = dot(r, r), rr
        p = [a + rr / last * b for a, b in zip(r, p, strict=True)]
    cross = grad(slope, x, v)
    return [-c if d is None else d - c for c, d in zip(cross, direct, strict=True)]


def dense(inner: Loss, outer: Loss, x: Sequence[Tensor], y: Sequence[Tensor]) -> list[Tensor]:
    """Return the same with every entry of ∇²_yy g and a direct solve."""
    x, y = ([t.detach().requires_grad_() for t in tensors] for tensors in (x, y))
    slope = flat(grad(inner(x, y), y, create_graph=True))
    rows = torch.eye(len(slope), dtype=slope.dtype, device=slope.device)
    hessian = torch.stack([flat(grad(slope, y, row, retain_graph=True)) for row in rows])
    outer_slope = grad(outer(x, y), y + x, allow_unused=True, materialize_grads=True)
    v = torch.linalg.solve(hessian, flat(outer_slope[: len(y)]))
    return [d - c for d, c in zip(outer_slope[len(y) :], grad(slope, x, v), strict=True)]


def dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, [torch.dot(u.view(-1), v.view(-1)) for u, v in zip(a, b, strict=True)])


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors])
