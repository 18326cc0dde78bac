"""The client's side of an exchange: from a message and what was kept, to a reply."""

from typing import Any

from flwr.app import ConfigRecord, RecordDict

from rabo.algorithms import Algorithm
from rabo.flower.messages import (
    cut_records,
    pack,
    read_cut,
    read_task,
    reply_records,
    unpack,
)
from rabo.flower.work import work_for
from rabo.metering import Meter
from rabo.problem import BilevelProblem
from rabo.runtimes.base import Local, perform
from rabo.submodel import Cut


class Worker:
    """A client with its data. What lasts between the exchanges of a round is in records.

    A process may live for one message only, so memory is written to the records that Flower keeps
    on the node; they never leave it.
    """

    def __init__(self, client: int, problem: BilevelProblem, algorithm: Algorithm):
        self.client, self.problem, self.algorithm = client, problem, algorithm
        self._meter = Meter()
        self._device = next(iter(problem.start()[0].values())).device

    def answer(self, kind: str, content: RecordDict, kept: RecordDict) -> RecordDict:
        """Do what a message asks for."""
        work = work_for(kind, self.algorithm)
        local, cut = self._resume(content, kept)
        task = read_task(content, cut, self._device)
        reply = perform(work, task, local, self._meter)
        _keep(task.round, cut, local, kept)
        return reply_records(reply, cut)

    def _resume(self, content: RecordDict, kept: RecordDict) -> tuple[Local, Cut]:
        """Begin on the cut that came with the message, or go on where the last one ended."""
        round = content.config_records["task"]["round"]
        is_new = "cut" in content
        if not is_new and ("held" not in kept or kept.config_records["held"]["round"] != round):
            raise ValueError(f"client {self.client} does not hold the submodel of round {round}")
        cut = read_cut(content if is_new else kept, self.problem.channels, self._device)
        local = Local(self.client, self.problem.restrict(cut))
        if not is_new:
            local.memory = {
                **unpack("memory", kept, self._device),
                **dict(kept.config_records["numbers"]),
            }
        return local, cut


def _keep(round: int, cut: Cut, local: Local, kept: RecordDict) -> None:
    tensors, numbers = {}, {}
    for name, value in local.memory.items():
        (numbers if isinstance(value, int | float) else tensors)[name] = value
    records: dict[str, Any] = {**cut_records(cut), **pack("memory", tensors)}
    records |= {"held": ConfigRecord({"round": round}), "numbers": ConfigRecord(numbers)}
    kept.update(records)
