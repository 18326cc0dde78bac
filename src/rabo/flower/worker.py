"""The client's side of an exchange: from a message and what was kept, to a reply."""

from dataclasses import replace

from flwr.app import ConfigRecord, RecordDict

from rabo.algorithms import Algorithm
from rabo.errors import lookup
from rabo.exchange.client import ClientContext
from rabo.exchange.cost import Meter
from rabo.exchange.request import Request
from rabo.exchange.work import perform
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
    read_request,
    reply_records,
    unpack,
    work_name,
)
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
        content: RecordDict,
        kept: RecordDict,
        privacy: Privacy | None = None,
        compare: bool = True,
    ) -> RecordDict:
        """Carry out a request; the answer is clipped and noised before it leaves the client.

        With `compare`, the answer says what the exchange costs with the full model.
        """
        work = lookup("work", work_name(content), self.algorithm.works)
        if privacy is not None:
            work = Protected(work, privacy)
        context, cut = self._resume(content, kept)
        request = read_request(content, cut, work, self._device)
        reply = perform(work, request, context, self._meter)
        if reply.fault is not None:
            return fault_records(reply.fault.cause)
        _keep(request, context, kept)
        if compare and work.name != CALIBRATION:
            of_client = self.client, self.problem, self.algorithm
            reply = replace(reply, full_cost=full_cost(*of_client, work, request, kept))
        return reply_records(reply, cut, work)

    def _resume(self, content: RecordDict, kept: RecordDict) -> tuple[ClientContext, Cut]:
        """Begin on the submodel of the message, or go on where the last exchange ended."""
        (round, exchange), channels = place_of(content), self.problem.channels
        if exchange == 0:
            cut = read_cut(unpack("request", content), channels, self._device)
            return ClientContext(self.client, self.problem.restrict(cut)), cut
        if "held" not in kept or dict(kept.config_records["held"]) != _held(round, exchange - 1):
            raise ValueError(
                f"client {self.client} does not hold the submodel of round {round + 1}"
            )
        vectors = unpack("memory", kept, self._device)
        cut = read_cut(vectors, channels, self._device)
        tensors = {k: v for k, v in vectors.items() if not k.startswith(CUT)}
        memory = {**tensors, **numbers_of("memory", kept)}
        return ClientContext(self.client, self.problem.restrict(cut), memory), cut


def _held(round: int, exchange: int) -> dict[str, int]:
    """Name the last exchange whose memory a client holds."""
    return {"round": round, "exchange": exchange}


def _keep(request: Request, context: ClientContext, kept: RecordDict) -> None:
    tensors, numbers = cut_vectors(request.submodel), {}
    for name, value in context.memory.items():
        (numbers if isinstance(value, int | float) else tensors)[name] = value
    kept.update(pack("memory", tensors, numbers))
    kept["held"] = ConfigRecord(_held(request.round, request.exchange))  # type: ignore[arg-type]
