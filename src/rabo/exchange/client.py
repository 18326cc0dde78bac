"""The client's side of an exchange: its problem, its batches and its memory."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Generator

from rabo.exchange.request import Request
from rabo.problems.bilevel import Batch, BilevelProblem, Level
from rabo.seeding import stream


@dataclass
class ClientContext:
    """A client's problem and memory while it works.

    `memory` holds numbers and dictionaries of tensors; it lasts until the round ends. Everything in
    `cache` can be computed again and may be dropped at any time.
    """

    client: int
    problem: BilevelProblem  # cut to the client's submodels
    memory: dict[str, Any] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)
    batches: dict[str | int, Batch] = field(default_factory=dict)

    def draw(self, request: Request, purpose: str | int) -> Batch:
        """Draw ξ and ζ for one step, or once for the whole round where the problem says so."""
        if self.problem.redraw == "step":
            return self.problem.batch(batch_stream(request, self.client, purpose))
        if "round" not in self.batches:
            self.batches["round"] = self.problem.batch(batch_stream(request, self.client, "round"))
        return self.batches["round"]

    def draw_level(self, request: Request, purpose: str | int, level: Level) -> Batch:
        """Draw as `draw` does, for work that sees one level alone; the other may be missing."""
        batch_of = getattr(self.problem, "batch_of", None)
        if batch_of is None or self.problem.redraw == "round":
            return self.draw(request, purpose)
        return batch_of(level, partial(batch_stream, request, self.client, purpose))

    def stream(self, request: Request, purpose: str | int) -> Generator:
        """Return the client's own source of random numbers in this round."""
        return stream(request.seed, request.round, self.client, purpose)


def batch_stream(request: Request, client: int, purpose: str | int) -> Generator:
    """Return the random stream of one of a client's batches."""
    return stream(request.seed, request.round, client, "batch", purpose)
