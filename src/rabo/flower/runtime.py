"""Clients on other machines, or simulated ones: every exchange is a message to each."""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from rabo.errors import ReplyError
from rabo.exchange.budgets import Absent, check_capacity
from rabo.exchange.request import Reply, Request
from rabo.exchange.work import Work, failed
from rabo.flower.messages import WIDTH, WORK, raise_fault, read_reply, request_records, words

REASONS = {
    1: "its app could not be loaded",
    3: "the message was lost",
    4: "the reply was lost",
    5: "its node is gone",
    8: "its process crashed",
}  # by Flower's code of an error; 2 is an exception, which has words of its own
NOBODY, GONE = Absent("no node has joined for it"), Absent("its node is gone")
SLACK = 10.0  # seconds that a message outlives its deadline, so that late is told from lost
DAY = 86400.0
PATIENCE, MOST_PAUSE = 1.3, 0.3
log = logging.getLogger("flwr")


@dataclass(frozen=True)
class Sent:
    """A message that waits for its reply."""

    node: int
    id: str | None  # None: it could not be sent
    round: int
    deadline: float


class FlowerRuntime:
    """Runs clients on the nodes of a Flower grid, in simulation or in deployment.

    Replies are fetched one at a time, in ascending order of clients, so that the server never holds
    more than one. A client that fails, or is late, has a reply that says why. A node that was late
    is not waited for until it has answered a roll call.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        deadline: float = 600.0,
        least: int = 0,
        wait: float = 0.0,
        poll: float = 0.03,
        device: torch.device | None = None,
    ):
        """Give clients `deadline` seconds for an exchange; look for replies after `poll` first.

        A roll call is held again until `least` clients can take part, for `wait` seconds at most.
        """
        if not deadline > 0:
            raise ValueError(f"a deadline must be positive, got {deadline}")
        self.grid, self.deadline, self.poll, self.device = grid, deadline, poll, device
        self.least, self.wait = least, wait
        self._nodes: dict[int, int] = {}  # client -> node, as of the last roll call
        self._late: dict[int, Sent] = {}  # node -> what it has not answered in time
        self._asked: dict[int, Sent] = {}  # node -> the roll call it was sent since

    def map(self, work: Work, requests: Iterable[Request]) -> Iterator[Reply]:
        waiting: list[tuple[Request, Sent]] = []
        for request in requests:
            node, records = self._nodes.get(request.client), request_records(request, work)
            sent = self._send(node, WORK, request.round, records, self.deadline)
            waiting.append((replace(request, arrays={}), sent))  # its tensors are not needed again
        for request, sent in waiting:
            try:
                reply = read_reply(self._content(sent), request, work, self.device)
            except Exception as error:  # whatever a client sends, the round goes on
                reply = failed(request, work, _in_words(error))
            yield reply

    def widths(self, round: int, clients: Sequence[int]) -> Mapping[int, float | Absent]:
        """Hold the roll call: nodes say whose data they have and how wide they can be."""
        end = time.monotonic() + self.wait
        found = self._roll_call(round, clients)
        while missing := [client for client in clients if isinstance(found[client], Absent)]:
            if len(clients) - len(missing) >= self.least or time.monotonic() > end:
                break
            time.sleep(MOST_PAUSE)
            found |= self._roll_call(round, missing)
        return found

    def _roll_call(self, round: int, clients: Sequence[int]) -> dict[int, float | Absent]:
        whose = {node: client for client, node in self._nodes.items()}
        found: dict[int, float | Absent] = {}
        for sent in self._call(round, clients, whose):
            try:
                answer = self._width(sent)
            except Exception as error:  # whatever a client sends, the round goes on
                answer = whose.get(sent.node), Absent(str(_in_words(error)))
            client, width = answer
            if client is None or client in found:
                why = _trouble(client, width)
                log.warning("node %d in round %d: %s", sent.node, round + 1, why)
                continue
            if client != whose.get(sent.node, client):
                del self._nodes[whose[sent.node]]
            self._nodes[client], found[client] = sent.node, width
        missing = {client: GONE if client in self._nodes else NOBODY for client in clients}
        return {client: found.get(client, why) for client, why in missing.items()}

    def _call(self, round: int, clients: Sequence[int], whose: Mapping[int, int]) -> list[Sent]:
        """Ask all nodes that may be clients of the round; those known longer come first."""
        online = sorted(self.grid.get_node_ids(), key=lambda node: (node not in whose, node))
        wanted = [node for node in online if whose.get(node) in {None, *clients}]
        content = RecordDict({"request": ConfigRecord({"round": round})})
        calls = []
        for node in wanted:
            # one that was late may answer at any time, and is asked once
            sent = self._asked.get(node) if node in self._late else None
            patience = DAY if node in self._late else self.deadline
            calls.append(sent or self._send(node, WIDTH, round, content, patience))
        self._asked = {sent.node: sent for sent in calls}
        return calls

    def _width(self, sent: Sent) -> tuple[int, float | Absent]:
        """Return who has answered a roll call, and how wide it can be."""
        late = self._late.get(sent.node)
        content = self._content(sent, wait=late is None)
        self._late.pop(sent.node, None)
        raise_fault(content)
        return _read_width(content)

    def _send(
        self, node: int | None, kind: str, round: int, records: RecordDict, patience: float
    ) -> Sent:
        if node is None:
            return Sent(0, None, round, 0.0)
        message = Message(records, node, kind, ttl=patience + SLACK, group_id=str(round))
        ids = list(self.grid.push_messages([message]))
        return Sent(node, ids[0] if ids else None, round, time.monotonic() + patience)

    def _content(self, sent: Sent, wait: bool = True) -> RecordDict:
        """Return what a node has answered, or raise why there is nothing."""
        pause = self.poll
        while sent.id is not None:
            for message in self.grid.pull_messages([sent.id]):
                if message.has_error():
                    self._asked.pop(sent.node, None)  # to be asked anew
                    error = message.error
                    raise ReplyError(REASONS.get(error.code) or words(error.reason))
                return message.content
            if not wait:
                raise ReplyError(f"no answer since round {self._late[sent.node].round + 1}")
            if time.monotonic() > sent.deadline:
                self._late[sent.node] = sent
                self._asked.pop(sent.node, None)
                raise ReplyError(f"no answer within {self.deadline:g} s")
            time.sleep(pause)
            pause = min(PATIENCE * pause, MOST_PAUSE)  # every look is work for the SuperLink
        raise ReplyError("it could not be reached")


def _in_words(error: Exception) -> ReplyError:
    if isinstance(error, ReplyError):
        return error
    return ReplyError(words(f"its reply cannot be read: {type(error).__name__}: {error}"))


def _trouble(client: int | None, answer: float | Absent) -> str:
    if client is None and isinstance(answer, Absent):
        return answer.why
    return f"it says that it is client {client}, which another node is"


def width_records(client: int, width: float | Absent) -> RecordDict:
    """Answer a roll call: of what a client has, only the width it asks for."""
    absent = isinstance(width, Absent)
    answer = {"client": client} | ({"why": width.why} if absent else {"width": float(width)})
    return RecordDict({"width": ConfigRecord(answer)})  # type: ignore[arg-type]


def _read_width(records: RecordDict) -> tuple[int, float | Absent]:
    answer = records.config_records["width"]
    client, why, width = answer["client"], answer.get("why"), answer.get("width")
    if not isinstance(client, int) or client < 0:
        raise ValueError(f"a client must be a number from 0 on, got {client!r}")
    if isinstance(why, str):
        return client, Absent(words(why))
    if not isinstance(width, float):
        raise ValueError(f"a width must be a number, got {width!r}")
    return client, check_capacity(width)
