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
    curvature: Tensor  # the largest ‖Hp‖/‖p‖ of its products: a lower bound of l_{g,1}


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dim=1, keepdim=True)


def relative(r: Tensor, b: Tensor) -> Tensor:
    """Return ‖r‖/‖b‖, zero where both are."""
    return r.norm() / b.norm().clamp(min=torch.finfo(b.dtype).tiny)


def stretch(hp: Tensor, p: Tensor) -> Tensor:
    """Return the largest ‖Hp‖/‖p‖ over blocks; zero for p = 0."""
    size = p.norm(dim=1)
    return torch.where(size > 0, hp.norm(dim=1) / size, 0.0).max()


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
    iterations, zero, stretches = 0, torch.zeros_like(rr), []
    least = torch.finfo(b.dtype).eps * rr  # below it, directions are rounding errors
    for _ in range(num_iterations):
        if tolerance and float(relative(r, b)) <= tolerance:
            break
        hp = product(p)
        stretches.append(stretch(hp, torch.where(rr > least, p, zero)))
        if is_damped:
            hp = hp + damping * p
        php = _dot(p, hp)
        goes_on = torch.minimum(php, rr) > 0  # p is zero where a block has stopped
        step = torch.where(goes_on, rr / php, zero)
        v, r = torch.addcmul(v, step, p), torch.addcmul(r, step, hp, value=-1)
        rr, last = _dot(r, r), rr
        p = torch.where(goes_on, torch.addcmul(r, rr / last, p), zero)
        iterations += 1
    return Solution(v, relative(r, b), iterations, largest(stretches, b))


def neumann(product: Product, b: Tensor, num_terms: int, step: float | Tensor) -> Solution:
    """Sum η Σ_{k<K} (I − ηH)^k b, written on H: v ← v + η r, r ← b − H v."""
    v, r, stretches = torch.zeros_like(b), b, []
    for _ in range(num_terms):
        hr = product(r)
        stretches.append(stretch(hr, r))
        v, r = v + step * r, r - step * hr
    return Solution(v, relative(r, b), num_terms, largest(stretches, b))


def largest(values: list[Tensor], like: Tensor) -> Tensor:
    """Return the largest of some numbers on the device, zero if there is none."""
    return torch.stack(values).max() if values else like.new_zeros(())
