"""Print how far a run is."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

SECONDS = 30.0  # between two lines of a run


class Progress:
    """A run observer that prints the round, the headline and the time left now and then."""

    def __init__(
        self,
        name: str,
        seconds: float = SECONDS,
        say: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._name, self._seconds, self._say, self._clock = name, seconds, say, clock
        self._reached = ""

    def begin(self, start: Any) -> None:
        self._start = start
        self._begun = self._told = self._clock()

    def add(self, done: Any) -> None:
        number, rounds, headline = done.round + 1, self._start.rounds, self._start.headline
        if headline in done.metrics:
            self._reached = f", {headline.replace('_', ' ')} {done.metrics[headline]:.4f}"
        now = self._clock()
        if now - self._told < self._seconds or number == rounds:
            return
        self._told = now
        each = (now - self._begun) / (number - len(self._start.history))
        left = timedelta(seconds=round(each * (rounds - number)))
        self._say(f"  {self._name}: round {number} of {rounds}{self._reached}, {left} left")

    def end(self, status: str) -> None:
        pass
