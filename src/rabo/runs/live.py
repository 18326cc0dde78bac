"""A run while it goes on: one view in a terminal, lines elsewhere."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from math import ceil, isfinite

from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rabo.exchange.state import HYPERGRADIENT_NORM
from rabo.federation.rounds import Round
from rabo.runs.redrawing import live_display
from rabo.runs.terminal import short
from rabo.runs.writers import Start, Writer

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 30  # of a sparkline
NUM_TIMED = 40  # newest rounds that say how long one takes
NUM_LINES = 10  # of a run where there is no terminal


def view_of(console: Console, quiet: bool = False) -> list[Writer]:
    """Return what shows a run: nothing if that is wished."""
    if quiet:
        return []
    return [LiveView(console)] if console.is_terminal else [PlainLines(console)]


class Progress:
    """What a view says of the rounds so far."""

    def __init__(self, start: Start, clock: Callable[[], float] = time.monotonic):
        self.start, self._clock, self.done = start, clock, len(start.history)
        self.headline: list[float] = []
        self.norms: list[float] = []
        self.residual: float | None = None
        self.last: Round | None = None
        self._begun, self._num_seen = clock(), 0  # rounds that were timed
        self._seconds = {kind: deque[float](maxlen=NUM_TIMED) for kind in (True, False)}
        for done in start.history:
            self._note(done)

    def add(self, done: Round) -> None:
        now = self._clock()
        if self._num_seen == 1:  # the first round also prepares and measures
            for seconds in self._seconds.values():
                seconds.clear()
        self._seconds[self.start.evaluates(done.round + 1)].append(now - self._begun)
        self._num_seen += 1
        self._begun = now
        self._note(done)

    def _note(self, done: Round) -> None:
        self.last, self.done = done, done.round + 1
        if self.start.headline in done.metrics:
            self.headline.append(done.metrics[self.start.headline])
        if HYPERGRADIENT_NORM in done.metrics:
            self.norms.append(done.metrics[HYPERGRADIENT_NORM])
        self.residual = done.metrics.get("residual", self.residual)

    def seconds_left(self) -> float | None:
        """Return what the rounds to come take if they take as long as the newest of their kind.

        There are two kinds: with and without an evaluation.
        """
        known = {kind: sum(s) / len(s) for kind, s in self._seconds.items() if s}
        num_left, every = self.start.rounds - self.done, self.start.evaluate_every
        if not known or not num_left:
            return None
        num_judged = (self.start.rounds - 1) // every - self.done // every + 1  # and the last
        plain, judged = (known.get(kind, max(known.values())) for kind in (False, True))
        since = self._clock() - self._begun
        return max(0.0, plain * (num_left - num_judged) + judged * num_judged - since)

    def lines(self) -> dict[str, str]:
        """Return what is known, by name; what is not known yet has no line."""
        lines = {}
        name = self.start.headline.replace("_", " ")
        if self.headline:
            best = (min if self.start.falls else max)(self.headline)
            lines[name] = f"{self.headline[-1]:.4g}  {sparkline(self.headline)}  best {best:.4g}"
        if self.norms:
            lines["hypergradient"] = f"{self.norms[-1]:.3g}  {sparkline(self.norms)}"
        if self.residual is not None:
            lines["residual"] = f"{self.residual:.3g}"
        if self.last is not None:
            lines |= {"coverage": coverage(self.last), "cost so far": cost(self.last)}
            lines["clients"] = clients(self.last)
        return lines


class LiveView:
    """A bar and a few lines that are drawn anew as rounds are done."""

    def __init__(self, console: Console):
        self._console = console

    def begin(self, start: Start) -> None:
        self._progress = Progress(start)
        self._live = live_display(self._console, self._draw)
        self._live.start()

    def add(self, done: Round) -> None:
        self._progress.add(done)

    def refresh(self) -> None:
        """Draw now; without this call, the view is drawn four times a second."""
        self._live.refresh()

    def end(self, status: str) -> None:
        self._live.stop()

    def _draw(self) -> Table:
        progress, start = self._progress, self._progress.start
        head = Table.grid(padding=(0, 2))
        title = Text(f"{start.config['task']} · {start.config['algorithm']}", style="bold")
        bar = ProgressBar(start.rounds, progress.done, width=24)
        head.add_row(title, bar, f"round {progress.done} of {start.rounds}", self._time_left())
        body = Table.grid(padding=(0, 2))
        body.add_column(style="dim", no_wrap=True)
        for name, text in progress.lines().items():
            body.add_row(name, Text(text))
        view = Table.grid()
        view.add_row(head)
        view.add_row(body)
        return view

    def _time_left(self) -> str:
        left = self._progress.seconds_left()
        return "" if left is None else f"{timedelta(seconds=round(left))} left"


class PlainLines:
    """A line every tenth of the rounds, and for evaluations that are not more frequent."""

    def __init__(self, console: Console):
        self._console = console

    def begin(self, start: Start) -> None:
        self._progress = Progress(start)

    def add(self, done: Round) -> None:
        progress, rounds = self._progress, self._progress.start.rounds
        progress.add(done)
        if not self._is_told(progress.done):
            return
        left = progress.seconds_left()
        metrics = [f"{name} {value:.4g}" for name, value in done.metrics.items()]
        share = done.relative_cost.get("multiply_adds")
        metrics += [] if share is None else [f"work {share:.0%} of the full model"]
        metrics += [f"{timedelta(seconds=round(left))} left"] if left else []
        line = f"round {progress.done}/{rounds}  {'  '.join(metrics)}"
        self._console.print(line, highlight=False, soft_wrap=True)

    def end(self, status: str) -> None:
        """All was said."""

    def _is_told(self, number: int) -> bool:
        start = self._progress.start
        step, every = max(1, start.rounds // NUM_LINES), start.evaluate_every
        if every < step:  # some of the evaluations
            return number % (every * ceil(step / every)) == 0 or number == start.rounds
        return number % step == 0 or start.evaluates(number)


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """Draw numbers as blocks between their least and their largest; many are thinned out."""
    if len(values) > width:
        values = [values[i * (len(values) - 1) // (width - 1)] for i in range(width)]
    known = [value for value in values if isfinite(value)]
    if not known:
        return ""
    low, high = min(known), max(known)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((v - low) * scale)] if isfinite(v) else " " for v in values)


def coverage(done: Round) -> str:
    """Say who trained what of x and y: C* of the round, and the share trained so far."""
    return " · ".join(
        f"C*_{level} {c.minimum}, {c.ever_trained:.0%} trained"
        if c.num_trained
        else f"{level} not trained this round, {c.ever_trained:.0%} so far"
        for level, c in done.coverage.items()
    )


def cost(done: Round) -> str:
    """Format the cost so far, and its share of the full model's cost once a round is done."""
    share, total = done.relative_cost, done.total
    traffic = total.bytes_up + total.bytes_down
    work, bytes = f"{short(total.multiply_adds)} multiply-adds", f"{short(traffic)}B"
    if not share:
        return f"{work} · {bytes}"
    return (
        f"{work} ({share['multiply_adds']:.0%} of the full model) · {bytes} "
        f"({share['bytes_up']:.0%} up, {share['bytes_down']:.0%} down)"
    )


def clients(done: Round) -> str:
    """Say how many took part, sat out, and were not listened to."""
    parts = [f"{len(done.present)} took part"]
    parts += [f"{len(done.absent)} sat out"] if done.absent else []
    parts += [f"{len(done.faults)} answers not used"] if done.faults else []
    parts += ["round given up"] if done.skipped else []
    return " · ".join(parts)
