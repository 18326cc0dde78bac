"""Lower bounds of the curvature from gradients that are computed anyway."""

from collections.abc import Callable

import torch
from torch import Tensor

from rabo.exchange.state import CURVATURE
from rabo.tree import Params, flatten, leaves, unflatten

ROUNDING = 1e3  # steps below this multiple of y's rounding give no secants,
LONGEST = 0.05  # nor steps below this share of ‖y‖ in low precision
BACKTRACKS = "backtracks"  # a number of replies: steps on y that a client took back


def ratio(turned: Tensor, moved: Tensor, size: Tensor) -> Tensor:
    """Return the secant turned/moved, or zero for steps so short that rounding dominates."""
    least = min(ROUNDING * torch.finfo(size.dtype).eps, LONGEST) * size
    return torch.where(moved <= least, 0.0, turned / moved)


def finite_secant(found: Tensor, beta: Tensor) -> Tensor:
    """Return a secant that makes β a tenth where the gradient has overflowed."""
    return torch.where(found < torch.inf, found, 5 / beta)


def on_rows(
    slope_at: Callable[..., Params], like: Params, copies: int = 1
) -> Callable[..., Tensor]:
    """Return a gradient as a function of y laid out as a matrix, one row per copy."""
    shapes = leaves(like)

    def slope(y: Tensor, *options: bool) -> Tensor:
        tree = dict(zip(like, unflatten(y, shapes), strict=True))
        return flatten(leaves(slope_at(tree, *options)), copies)

    return slope


class SafeSteps:
    """Plain steps with a size β that shrinks where a secant exceeds 1/β.

    Such a step is taken back: the client goes on from the point before with 1/(2·secant). y is a
    matrix with one row per copy (`flatten`), and every copy has its own β. Nothing is read from
    the device.
    """

    def __init__(self, beta: float | Tensor, like: Tensor):
        copies = len(like)
        beta = torch.as_tensor(beta, dtype=like.dtype, device=like.device)
        self.beta = beta.expand(copies, 1)
        self.curvature = like.new_zeros(copies, 1)  # the largest secant so far
        self.backtracks = like.new_zeros(copies, 1)
        self._last: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def check(self, y: Tensor, slope: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the point and the slope to go on from, and which copies have gone back.

        Slopes of consecutive calls must be of the same batch; `forget` starts with another one.
        """
        back = None
        if self._last is not None:
            y, slope, back = self._compare(y, slope, *self._last)
        self._last = (y, slope)
        return y, slope, back

    def probe(self, y: Tensor, slope: Tensor, slope_at: Callable[[Tensor], Tensor]) -> None:
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

    def step(self, y: Tensor, velocity: Tensor) -> Tensor:
        """Return y − β·velocity."""
        return torch.addcmul(y, self.beta, velocity, value=-1)

    def seen(self, curvature: Tensor | None = None) -> dict[str, Tensor]:
        """Return the scalars of a reply: the largest curvature and the steps taken back."""
        largest = self.curvature.max()
        if curvature is not None:
            largest = torch.maximum(largest, curvature)
        return {CURVATURE: largest, BACKTRACKS: self.backtracks.max()}

    def _compare(
        self, y: Tensor, slope: Tensor, y_before: Tensor, slope_before: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = ratio(_norms(slope - slope_before), _norms(y - y_before), _norms(y))
        found = finite_secant(found, self.beta)
        self.curvature = torch.maximum(self.curvature, found)
        back = found * self.beta > 1
        self.beta = torch.where(back, 0.5 / found, self.beta)
        self.backtracks = self.backtracks + back
        return torch.where(back, y_before, y), torch.where(back, slope_before, slope), back


def _norms(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=1, keepdim=True)
