"""How curved an inner problem is: l_{g,1} and μ_g by Lanczos iterations."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

NUM_SQUARINGS = 20  # the power 2^20 tells eigenvalues apart that differ by a millionth


class Curvature(NamedTuple):
    """Bounds of the spectrum of ∇²_yy g as far as a few products tell, as numbers on the device."""

    largest: Tensor  # l_{g,1}, rarely too small
    smallest: Tensor  # the smallest Ritz value, never below μ_g
    margin: Tensor  # how far below it μ_g may lie


def lanczos(product: Callable[[Tensor], Tensor], like: Tensor, num_products: int) -> Curvature:
    """Estimate the extreme eigenvalues of a symmetric operator from a few products.

    Ritz values lie inside the spectrum, so the residual of the outermost pair is added: the largest
    is then rarely too small, which is what a safe step size needs. Nothing is read from the device.
    """
    q = _start(like)
    basis = q[None]
    diagonal: list[Tensor] = []
    offdiagonal: list[Tensor] = []
    goes_on = torch.ones((), dtype=torch.bool, device=like.device)
    for _ in range(min(num_products, like.numel())):
        w = product(q.reshape(like.shape)).flatten()
        diagonal.append(torch.where(goes_on, w @ q, diagonal[0] if diagonal else w @ q))
        for _ in range(2):  # twice is enough to stay orthogonal
            w = w - (basis @ w) @ basis
        size = w.norm()
        goes_on = goes_on & (size > 1e-6 * torch.stack(diagonal).abs().max())
        offdiagonal.append(torch.where(goes_on, size, 0.0))
        q = torch.where(goes_on, w / size, 0.0)  # an invariant subspace: the rest adds nothing
        basis = torch.cat([basis, q[None]])
    tridiagonal = torch.diag(torch.stack(diagonal).double())
    if len(diagonal) > 1:
        beside = torch.stack(offdiagonal[:-1]).double()
        tridiagonal = tridiagonal + torch.diag(beside, 1) + torch.diag(beside, -1)
    last = offdiagonal[-1].double()
    (largest, above), (smallest, below) = (_extreme(tridiagonal, sign) for sign in (1, -1))
    return Curvature(largest + last * above, smallest, last * below)


def _start(like: Tensor) -> Tensor:
    """Return a unit vector without any pattern an operator could share."""
    angles = torch.arange(like.numel(), dtype=torch.float64, device=like.device)
    q = torch.sin(angles.square() * 0.6180339887498949 + angles + 1).to(like.dtype)
    return q / q.norm()


def _extreme(matrix: Tensor, sign: int) -> tuple[Tensor, Tensor]:
    """Return the largest (or smallest) eigenvalue and the last entry of its unit eigenvector."""
    radius = matrix.abs().sum(dim=1).max().clamp(min=torch.finfo(matrix.dtype).tiny)
    eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    power = 2 * eye + sign * matrix / radius  # positive, with the wanted eigenvalue on top
    for _ in range(NUM_SQUARINGS):
        power = power @ power
        power = power / power.norm()
    vector = power.index_select(1, power.diagonal().argmax().reshape(1)).squeeze(1)
    vector = vector / vector.norm()
    return vector @ matrix @ vector, vector[-1].abs()
