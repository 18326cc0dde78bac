"""Limits on the work of a check."""

from collections.abc import Callable
from time import monotonic

from torch import Tensor


class OutOfTimeError(RuntimeError):
    """A check reached its time limit."""


class Clock:
    """A time limit for long loops."""

    def __init__(self, seconds: float):
        self.seconds, self._start = seconds, monotonic()

    @property
    def elapsed(self) -> float:
        return monotonic() - self._start

    def tick(self) -> None:
        """Raise once the time is up."""
        if self.elapsed > self.seconds:
            raise OutOfTimeError

    def guard(self, product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return a product that checks the clock first."""

        def guarded(p: Tensor) -> Tensor:
            self.tick()
            return product(p)

        return guarded
