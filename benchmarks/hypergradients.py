"""Hypergradients against a plain autograd loop: `python benchmarks/hypergradients.py`.

The bar is conjugate gradients as a good user writes them: one retained graph of ∇_y g for all
Hessian products and the cross term. Errors are relative to a dense solve in float64.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import grad

import rabo
from problems import Case, Loss, few_shot, logistic
from rabo.hypergradients import HypergradientEstimator
from timing import interleave, machine, prepare, print_table, ratio, write_json

BAR = "plain autograd CG10"
OURS = "rabo conjugate-gradient 10"
ESTIMATORS: dict[str, HypergradientEstimator] = {
    OURS: rabo.ConjugateGradient(num_iterations=10),
    "rabo neumann 10": rabo.Neumann(num_terms=10),
    "rabo unrolled 10": rabo.Unrolled(num_steps=10),
    "rabo directional-difference 10": rabo.DirectionalDifference(num_iterations=10),
}
COORDINATES = {"rabo coordinate-difference 10": rabo.CoordinateDifference(num_iterations=10)}


def dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, [torch.dot(u.view(-1), v.view(-1)) for u, v in zip(a, b, strict=True)])


def plain(
    inner: Loss, outer: Loss, x: Sequence[Tensor], y: Sequence[Tensor], num_iterations: int = 10
) -> list[Tensor]:
    """∇_x f − ∇²_xy g·v with ∇²_yy g·v = ∇_y f, by conjugate gradients on torch.autograd."""
    x, y = ([t.detach().requires_grad_() for t in tensors] for tensors in (x, y))
    slope = grad(inner(x, y), y, create_graph=True)
    outer_slope = grad(outer(x, y), y + x, allow_unused=True)
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
    rows = torch.eye(len(slope), dtype=slope.dtype)
    hessian = torch.stack([flat(grad(slope, y, row, retain_graph=True)) for row in rows])
    outer_slope = grad(outer(x, y), y + x, allow_unused=True, materialize_grads=True)
    v = torch.linalg.solve(hessian, flat(outer_slope[: len(y)]))
    return [d - c for d, c in zip(outer_slope[len(y) :], grad(slope, x, v), strict=True)]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors])


def compare(
    make: Callable[..., Case], estimators: Mapping[str, HypergradientEstimator], repeats: int
) -> list[dict[str, Any]]:
    """Time the bar and every estimator in turn, and measure their errors."""
    case, exact = make(), make(dtype=torch.float64)
    x, y = list(case.x.values()), list(case.y.values())
    truth = flat(dense(exact.inner, exact.outer, [t.double() for t in x], [t.double() for t in y]))
    work: dict[str, Callable[[], Sequence[Tensor]]] = {
        BAR: lambda: plain(case.inner, case.outer, x, y)
    }
    for name, estimator in estimators.items():
        work[name] = lambda estimator=estimator: list(
            estimator(case.problem, case.x, case.y, case.batch).value.values()
        )
    times = interleave(work, repeats)
    return [
        {
            "problem": case.name,
            "estimator": name,
            "milliseconds": 1000 * statistics.median(times[name]),
            "ratio": ratio(times[name], times[BAR]),
            "error": float((flat(work[name]()).double() - truth).norm() / truth.norm()),
        }
        for name in work
    ]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--repeats", type=int, default=30)
    options.add_argument("--json", type=Path, default=Path("runs/benchmarks/hypergradients.json"))
    chosen = options.parse_args()
    prepare()
    rows = compare(logistic, ESTIMATORS, chosen.repeats)
    rows += compare(few_shot, ESTIMATORS, chosen.repeats)
    small = compare(lambda **kind: logistic(200, **kind), COORDINATES, 5)
    rows += [row | {"problem": "A, 200 weights"} for row in small]
    print_table(
        [
            {
                "problem": row["problem"],
                "estimator": row["estimator"],
                "CPU ms": f"{row['milliseconds']:.1f}",
                "x plain": f"{row['ratio']:.3f}",
                "error": f"{row['error']:.2e}",
            }
            for row in rows
        ]
    )
    print(
        "coordinate-difference takes a gradient per coordinate of x: B's 111,680 would take more "
        "than half an hour; hence a smaller A, and no B."
    )
    write_json(chosen.json, {"machine": machine(), "repeats": chosen.repeats, "rows": rows})


if __name__ == "__main__":
    main()
