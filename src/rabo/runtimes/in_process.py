"""All clients in this process, one after the other: the reference."""

from collections.abc import Iterable, Iterator, Mapping

from rabo.metering import Meter
from rabo.problem import BilevelProblem
from rabo.runtimes.base import Local, Reply, Task, Work, perform
from rabo.submodel import Cut


class InProcess:
    """Runs one client after the other, as their tasks come: in ascending order."""

    def __init__(self, problems: Mapping[int, BilevelProblem]):
        self.problems = problems
        self._meter = Meter()
        self._round = -1
        self._locals: dict[int, Local] = {}
        self._cuts: dict[int, Cut] = {}

    def map(self, work: Work, tasks: Iterable[tuple[int, Task]]) -> Iterator[tuple[int, Reply]]:
        for client, task in tasks:
            yield client, perform(work, task, self._local(client, task), self._meter)

    def _local(self, client: int, task: Task) -> Local:
        if task.round != self._round:
            self._round, self._locals, self._cuts = task.round, {}, {}
        if client not in self._locals or self._cuts[client] is not task.cut:
            self._cuts[client] = task.cut
            self._locals[client] = Local(client, self.problems[client].restrict(task.cut))
        return self._locals[client]
