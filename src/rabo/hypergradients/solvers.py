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


def _relative(r: Tensor, b: Tensor) -> Tensor:
    return r.norm() / b.norm().clamp(min=torch.finfo(b.dtype).tiny)


def conjugate_gradient(
    product: Product, b: Tensor, num_iterations: int, tolerance: float = 0.0, damping: float = 0.0
) -> Solution:
    """Solve (H + damping·I) v = b.

    A block stops where its residual is zero or where the curvature along its direction is not
    positive: beyond that point the answer would leave the region in which g is convex. A positive
    tolerance reads the device once per iteration.
    """
    v, r, p = torch.zeros_like(b), b, b
    rr = _dot(r, r)
    iterations = 0
    for _ in range(num_iterations):
        if tolerance and float(_relative(r, b)) <= tolerance:
            break
        hp = product(p) + damping * p if damping else product(p)
        php = _dot(p, hp)
        goes_on = (php > 0) & (rr > 0)
        step = torch.where(goes_on, rr / php, 0.0)
        v, r = v + step * p, r - step * hp
        rr_next = _dot(r, r)
        p = r + torch.where(goes_on, rr_next / rr, 0.0) * p
        rr = torch.where(goes_on, rr_next, 0.0)
        iterations += 1
    return Solution(v, _relative(r, b), iterations)


def neumann(product: Product, b: Tensor, num_terms: int, step: float) -> Solution:
    """Sum η Σ_{k<K} (I − ηH)^k b, written on H: v ← v + η r, r ← b − H v."""
    v, r = torch.zeros_like(b), b
    for _ in range(num_terms):
        v = v + step * r
        r = r - step * product(r)
    return Solution(v, _relative(r, b), num_terms)
