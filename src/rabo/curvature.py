"""How curved an inner problem is: l_{g,1} and μ_g by Lanczos iterations."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Generator, Tensor


class Curvature(NamedTuple):
    """Bounds of the spectrum of ∇²_yy g as far as a few products tell."""

    largest: float  # l_{g,1}
    smallest: float  # μ_g


def lanczos(
    product: Callable[[Tensor], Tensor], like: Tensor, num_products: int, generator: Generator
) -> Curvature:
    """Estimate the extreme eigenvalues of a symmetric operator from a few products.

    Ritz values lie inside the spectrum, so the residual of the outermost pair is added: the largest
    is then rarely too small, which is what a safe step size needs.
    """
    q = torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)
    basis = [q / q.norm()]
    diagonal: list[Tensor] = []
    offdiagonal: list[Tensor] = []
    for _ in range(min(num_products, like.numel())):
        w = product(basis[-1])
        diagonal.append((w * basis[-1]).sum())
        for _ in range(2):  # twice is enough to stay orthogonal
            for b in basis:
                w = w - (w * b).sum() * b
        offdiagonal.append(w.norm())
        if float(offdiagonal[-1]) <= 1e-6 * max(abs(float(d)) for d in diagonal):
            break
        basis.append(w / offdiagonal[-1])
    tridiagonal = torch.diag(torch.stack(diagonal)).double().cpu()
    for i, value in enumerate(offdiagonal[: len(diagonal) - 1]):
        tridiagonal[i, i + 1] = tridiagonal[i + 1, i] = float(value)
    values, vectors = torch.linalg.eigh(tridiagonal)
    margin = float(offdiagonal[-1]) * vectors[-1].abs()
    return Curvature(float(values[-1] + margin[-1]), float(values[0]))
