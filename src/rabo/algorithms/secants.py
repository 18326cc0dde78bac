"""Lower bounds of the curvature from gradients that are computed anyway."""

from collections.abc import Callable

import torch
from torch import Tensor

from rabo.algorithms.base import CURVATURE
from rabo.tree import Params, leaves

ROUNDING = 1e3  # steps below this multiple of y's rounding give no secants,
LONGEST = 0.05  # nor steps below this share of ‖y‖ in low precision
BACKTRACKS = "backtracks"  # a number of replies: steps on y that a client took back


def secant(y: Params, way: Params, change: Params, copies: int = 1) -> Tensor:
    """Return ‖∇g(y') − ∇g(y)‖/‖y' − y‖ of every copy of y."""
    return ratio(_norms(change, copies), _norms(way, copies), _norms(y, copies))


def ratio(turned: Tensor, moved: Tensor, size: Tensor) -> Tensor:
    """Return turned/moved, or zero for steps so short that rounding dominates."""
    least = min(ROUNDING * torch.finfo(size.dtype).eps, LONGEST) * size
    return torch.where(moved <= least, 0.0, turned / moved)


def finite_secant(found: Tensor, beta: Tensor) -> Tensor:
    """Return a secant that makes β a tenth where the gradient has overflowed."""
    return torch.where(found.isfinite(), found, 5 / beta)


class SafeSteps:
    """Plain steps with a size β that shrinks where a secant exceeds 1/β.

    Such a step is taken back: the client goes on from the point before with 1/(2·secant). Every
    copy of y has its own β. Nothing is read from the device.
    """

    def __init__(self, beta: float | Tensor, like: Params, copies: int):
        first = leaves(like)[0]
        self.beta = torch.as_tensor(beta, dtype=first.dtype, device=first.device).expand(copies)
        self.curvature = first.new_zeros(copies)  # the largest secant so far
        self.backtracks = first.new_zeros(copies)
        self._copies = copies
        self._last: tuple[Params, Params] | None = None

    @torch.no_grad()
    def check(self, y: Params, slope: Params) -> tuple[Params, Params, Tensor | None]:
        """Return the point and the slope to go on from, and which copies have gone back.

        Slopes of consecutive calls must be of the same batch; `forget` starts with another one.
        """
        back = None
        if self._last is not None:
            y, slope, back = self._compare(y, slope, *self._last)
        self._last = (y, slope)
        return y, slope, back

    def probe(self, y: Params, slope: Params, slope_at: Callable[[Params], Params]) -> None:
        """Bound β by the secant of a trial step: one more gradient on the same batch."""
        self.check(y, slope)
        ahead = self.step(y, slope)
        self.check(ahead, slope_at(ahead))
        self.forget()

    @property
    def size(self) -> Tensor:
        """β of a single y, as precise as a number of the request."""
        return self.beta.reshape(()).double()

    def forget(self) -> None:
        """Start with another batch: its slopes are not compared with those before."""
        self._last = None

    def step(self, y: Params, velocity: Params) -> dict[str, Tensor]:
        """Return y − β·velocity."""
        return {k: v - self._along(self.beta, v).to(v.dtype) * velocity[k] for k, v in y.items()}

    def kept(self, velocity: Params, back: Tensor | None) -> Params:
        """Return the velocity; zero for copies that have gone back."""
        if back is None:
            return velocity
        return {k: v.masked_fill(self._along(back, v), 0.0) for k, v in velocity.items()}

    def seen(self, curvature: Tensor | None = None) -> dict[str, Tensor]:
        """Return the scalars of a reply: the largest curvature and the steps taken back."""
        largest = self.curvature.max()
        if curvature is not None:
            largest = torch.maximum(largest, curvature)
        return {CURVATURE: largest, BACKTRACKS: self.backtracks.max()}

    def _compare(
        self, y: Params, slope: Params, y_before: Params, slope_before: Params
    ) -> tuple[Params, Params, Tensor]:
        way, change = _minus(y, y_before), _minus(slope, slope_before)
        found = secant(y, way, change, self._copies)
        found = finite_secant(found, self.beta)
        self.curvature = torch.maximum(self.curvature, found)
        back = found * self.beta > 1
        self.beta = torch.where(back, 0.5 / found, self.beta)
        self.backtracks = self.backtracks + back
        return self._choose(back, y_before, y), self._choose(back, slope_before, slope), back

    def _choose(self, back: Tensor, before: Params, after: Params) -> dict[str, Tensor]:
        return {k: torch.where(self._along(back, v), before[k], v) for k, v in after.items()}

    def _along(self, per_copy: Tensor, like: Tensor) -> Tensor:
        """Shape a number per copy so that it broadcasts over a tensor of y."""
        return per_copy.reshape((-1, *[1] * (like.dim() - 1)) if self._copies > 1 else ())


def _minus(a: Params, b: Params) -> dict[str, Tensor]:
    return {k: v - b[k] for k, v in a.items()}


def _norms(tree: Params, copies: int) -> Tensor:
    """Return the norm of every copy, over all tensors."""
    norms = [torch.linalg.vector_norm(t.reshape(copies, -1), dim=1) for t in leaves(tree)]
    return torch.linalg.vector_norm(torch.stack(norms), dim=0)
