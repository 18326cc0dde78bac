"""All clients in this process, one after the other: the reference."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rabo.exchange.cost import Meter
from rabo.exchange.work import Local, Reply, Task, Work, perform
from rabo.problems.bilevel import BilevelProblem


class InProcess:
    """Runs one client after the other, as their tasks come: in ascending order.

    Between two exchanges of a round, only what a client remembers is kept of it.
    """

    def __init__(self, problems: Mapping[int, BilevelProblem]):
        self.problems = problems
        self._meter = Meter()
        self._round = -1
        self._memory: dict[int, dict[str, Any]] = {}

    def map(self, work: Work, tasks: Iterable[tuple[int, Task]]) -> Iterator[tuple[int, Reply]]:
        for client, task in tasks:
            yield client, perform(work, task, self._local(client, task), self._meter)

    def _local(self, client: int, task: Task) -> Local:
        if task.round != self._round:
            self._round, self._memory = task.round, {}
        if task.exchange == 0:
            self._memory[client] = {}
        memory = self._memory.setdefault(client, {})
        return Local(client, self.problems[client].restrict(task.cut), memory)
