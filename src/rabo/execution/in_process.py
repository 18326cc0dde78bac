"""All clients in this process, one after the other: the reference."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rabo.exchange.client import ClientContext
from rabo.exchange.cost import Meter
from rabo.exchange.request import Reply, Request
from rabo.exchange.work import Work, perform
from rabo.problems.bilevel import BilevelProblem


class InProcess:
    """Runs one client after the other, as requests come: in ascending order.

    Between two exchanges of a round, it keeps only each client's memory and cache.
    """

    def __init__(self, problems: Mapping[int, BilevelProblem]):
        self.problems = problems
        self._meter = Meter()
        self._round = -1
        self._kept: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}  # memory and cache

    def map(self, work: Work, requests: Iterable[Request]) -> Iterator[Reply]:
        for request in requests:
            yield perform(work, request, self.context(request), self._meter)

    def context(self, request: Request) -> ClientContext:
        """Return the client of a request, with its memory of this round."""
        if request.round != self._round:
            self._round, self._kept = request.round, {}
        client = request.client
        if request.exchange == 0 or client not in self._kept:
            self._kept[client] = {}, {}
        problem = self.problems[client].restrict(request.submodel)
        return ClientContext(client, problem, *self._kept[client])
