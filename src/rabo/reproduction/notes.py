"""What a run says of itself while it is under way."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

EVERY = 30.0  # seconds between two notes of a run


class Notes:
    """A writer that says, now and then, where a run stands and how long it may still take."""

    def __init__(
        self,
        tell: Callable[[str], None],
        every: float = EVERY,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._tell, self._every, self._clock = tell, every, clock
        self._reached = ""

    def begin(self, start: Any) -> None:
        self._start, self._begun = start, self._clock()
        self._told = self._begun

    def add(self, done: Any) -> None:
        number, rounds, headline = done.round + 1, self._start.rounds, self._start.headline
        if headline in done.metrics:
            self._reached = f", {headline.replace('_', ' ')} {done.metrics[headline]:.4f}"
        now = self._clock()
        if now - self._told < self._every or number == rounds:
            return
        self._told = now
        each = (now - self._begun) / (number - len(self._start.history))
        left = timedelta(seconds=round(each * (rounds - number)))
        self._tell(f"round {number} of {rounds}{self._reached}, about {left} left")

    def end(self, status: str) -> None:
        pass
