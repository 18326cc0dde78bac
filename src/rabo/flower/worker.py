"""The client's side of an exchange: from a message and what was kept, to a reply."""

from flwr.app import ConfigRecord, RecordDict
from torch import Tensor

from rabo.algorithms import Algorithm
from rabo.exchange.cost import Meter
from rabo.exchange.work import Local, Task, perform
from rabo.execution import Privacy, Protected
from rabo.federation.rounds import CALIBRATION
from rabo.flower.full_costs import full_cost
from rabo.flower.messages import (
    CUT,
    cut_vectors,
    fault_records,
    numbers_of,
    pack,
    place_of,
    read_cut,
    read_task,
    reply_records,
    unpack,
)
from rabo.flower.work import work_for
from rabo.problems.bilevel import BilevelProblem
from rabo.pruning.submodel import Cut
from rabo.tree import leaves


class Worker:
    """A client with its data. What lasts between the exchanges of a round is in records.

    A process may live for one message only, so memory is written to the records that Flower keeps
    on the node; they never leave it.
    """

    def __init__(self, client: int, problem: BilevelProblem, algorithm: Algorithm):
        self.client, self.problem, self.algorithm = client, problem, algorithm
        self._meter = Meter()
        self._device = leaves(problem.start())[0].device

    def answer(
        self,
        kind: str,
        content: RecordDict,
        kept: RecordDict,
        privacy: Privacy | None = None,
        compare: bool = True,
    ) -> RecordDict:
        """Do what a message asks for; what leaves the client is clipped and noised already.

        With `compare`, the answer says what the exchange costs with the full model.
        """
        work = work_for(kind, self.algorithm)
        if privacy is not None:
            work = Protected(work, privacy)
        local, cut = self._resume(content, kept)
        task = read_task(content, cut, self._device)
        reply = perform(work, task, local, self._meter)
        if reply.fault is not None:
            return fault_records(reply.fault.cause)
        _keep(task, local, kept)
        if compare and work.__name__ != CALIBRATION:
            of_client = self.client, self.problem, self.algorithm
            reply = reply._replace(full_cost=full_cost(*of_client, task, work.__name__, kept))
        return reply_records(reply, cut)

    def _resume(self, content: RecordDict, kept: RecordDict) -> tuple[Local, Cut]:
        """Begin on the cut that came with the message, or go on where the last one ended."""
        (round, exchange), channels = place_of(content), self.problem.channels
        if exchange == 0:
            cut = read_cut(unpack("task", content), channels, self._device)
            return Local(self.client, self.problem.restrict(cut)), cut
        if "held" not in kept or dict(kept.config_records["held"]) != _held(round, exchange - 1):
            raise ValueError(
                f"client {self.client} does not hold the submodel of round {round + 1}"
            )
        vectors = unpack("memory", kept, self._device)
        cut = read_cut(vectors, channels, self._device)
        local = Local(self.client, self.problem.restrict(cut))
        tensors = {k: v for k, v in vectors.items() if not k.startswith(CUT)}
        local.memory = {**tensors, **numbers_of("memory", kept)}
        return local, cut


def _held(round: int, exchange: int) -> dict[str, int]:
    """Name the last exchange whose memory a client holds."""
    return {"round": round, "exchange": exchange}


def _keep(task: Task, local: Local, kept: RecordDict) -> None:
    tensors, numbers = cut_vectors(task.cut), {}
    for name, value in local.memory.items():
        if isinstance(value, int | float):
            numbers[name] = value
        elif isinstance(value, dict) and all(isinstance(t, Tensor) for t in value.values()):
            tensors[name] = value
    kept.update(pack("memory", tensors, numbers))
    kept["held"] = ConfigRecord(_held(task.round, task.exchange))  # type: ignore[arg-type]
