"""Linear solvers for ∇²_yy g·v = b, one row per independent block."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]


class Solution(NamedTuple):
    v: Tensor
    residual: Tensor  # ‖H v − b‖ / ‖b‖ over all blocks
    iterations: int


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dim=1, keepdim=True)


def relative(r: Tensor, b: Tensor) -> Tensor:
    """Return ‖r‖/‖b‖, zero where both are."""
    return r.norm() / b.norm().clamp(min=torch.finfo(b.dtype).tiny)


def conjugate_gradient(
    product: Product,
    b: Tensor,
    num_iterations: int,
    tolerance: float = 0.0,
    damping: float | Tensor = 0.0,
) -> Solution:
    """Solve (H + damping·I) v = b.

    A block stops where its residual is zero, and where the curvature along its direction is not
    positive: beyond that point the answer would leave the region in which g is convex. The residual
    is that of the damped system. A positive tolerance reads the device once per iteration.
    """
    v, r, p, rr = torch.zeros_like(b), b, b, _dot(b, b)
    is_damped = isinstance(damping, Tensor) or damping > 0
    iterations, zero = 0, torch.zeros_like(rr)
    for _ in range(num_iterations):
        if tolerance and float(relative(r, b)) <= tolerance:
            break
        hp = product(p) + damping * p if is_damped else product(p)
        php = _dot(p, hp)
        goes_on = torch.minimum(php, rr) > 0  # p is zero where a block has stopped
        step = torch.where(goes_on, rr / php, zero)
        v, r = torch.addcmul(v, step, p), torch.addcmul(r, step, hp, value=-1)
        rr, last = _dot(r, r), rr
        p = torch.where(goes_on, torch.addcmul(r, rr / last, p), zero)
        iterations += 1
    return Solution(v, relative(r, b), iterations)


def neumann(product: Product, b: Tensor, num_terms: int, step: float | Tensor) -> Solution:
    """Sum η Σ_{k<K} (I − ηH)^k b, written on H: v ← v + η r, r ← b − H v."""
    v, r = torch.zeros_like(b), b
    for _ in range(num_terms):
        v = v + step * r
        r = r - step * product(r)
    return Solution(v, relative(r, b), num_terms)
