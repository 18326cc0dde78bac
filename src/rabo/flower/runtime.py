"""Clients on other machines, or simulated ones: every exchange is a message to each."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from rabo.flower.messages import read_reply, task_records
from rabo.flower.work import WIDTH, message_type
from rabo.resources import Absent, check_capacity
from rabo.runtimes.base import Reply, Task, Work
from rabo.submodel import Cut

T = TypeVar("T")
OnFault = Callable[[int, int, str, str], None]  # client, round, phase, why
UNKNOWN = -1  # the client of a node that has not said who it is
REASONS = {
    1: "its app could not be loaded",
    3: "the message was lost",
    4: "the reply was lost",
    5: "its node is gone",
    8: "its process crashed",
}  # by Flower's code of an error; 2 is an exception, which has words of its own
MOST_WORDS = 500  # of what a client says about its failure
SLACK = 10.0  # seconds that a message outlives its deadline, so that late is told from lost
DAY = 86400.0
PATIENCE, MOST_PAUSE = 1.3, 0.3


@dataclass(frozen=True)
class Sent:
    """A message that waits for its reply."""

    client: int
    node: int
    id: str | None  # None: it could not be sent
    deadline: float


class FlowerRuntime:
    """Runs clients on the nodes of a Flower grid, in simulation or in deployment.

    Replies are fetched one at a time, in ascending order of clients, so that the server never holds
    more than one. A client that fails or is late has no reply in this exchange; `on_fault` is told
    who, when, in which phase and why. A node that was late is not waited for until it has answered
    a roll call.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        deadline: float = 600.0,
        poll: float = 0.03,
        on_fault: OnFault | None = None,
        device: torch.device | None = None,
    ):
        """Give clients `deadline` seconds for an exchange; look for replies after `poll` first."""
        if not deadline > 0:
            raise ValueError(f"a deadline must be positive, got {deadline}")
        self.grid, self.deadline, self.poll, self.device = grid, deadline, poll, device
        self._report: OnFault = on_fault or (lambda *_: None)
        self._nodes: dict[int, int] = {}  # client -> node, as of the last roll call
        self._round, self._cuts = -1, dict[int, Cut]()  # what clients hold in the round under way
        self._late: dict[int, Sent | None] = {}  # node -> the roll call it was sent since

    def map(self, work: Work, tasks: Iterable[tuple[int, Task]]) -> Iterator[tuple[int, Reply]]:
        kind = message_type(work)
        waiting: list[tuple[Sent, Cut]] = []
        for client, task in tasks:
            if task.round != self._round:
                self._round, self._cuts = task.round, {}
            with_cut = self._cuts.pop(client, None) is not task.cut
            records = task_records(task, with_cut=with_cut)
            node = self._nodes.get(client, UNKNOWN)
            waiting.append((self._send(client, node, kind, task.round, records), task.cut))
        for sent, cut in waiting:
            reply = self._received(
                sent, work.__name__, self._round, lambda c, cut=cut: read_reply(c, cut, self.device)
            )
            if reply is not None:
                self._cuts[sent.client] = cut
                yield sent.client, reply

    def widths(self, round: int, clients: Sequence[int]) -> Mapping[int, float | Absent]:
        """Hold the roll call: nodes say whose data they have and how wide they can be."""
        known = {node: client for client, node in self._nodes.items()}
        asked: list[Sent] = []
        for node in sorted(self.grid.get_node_ids()):
            client = known.get(node, UNKNOWN)
            if self._late.get(node) is None and (client == UNKNOWN or client in clients):
                # one that was late may answer at any time, and is asked once
                wait = DAY if node in self._late else self.deadline
                asked.append(self._send(client, node, WIDTH, round, _call(round), wait))
        self._late |= {sent.node: sent for sent in asked if sent.node in self._late}
        prompt = [sent for sent in asked if sent.node not in self._late]
        found: dict[int, float | Absent] = {}
        for sent in [*prompt, *filter(None, list(self._late.values()))]:
            answer = self._received(sent, WIDTH, round, _read_width, sent.node not in self._late)
            if answer is None:
                continue
            self._late.pop(sent.node, None)
            client, width = answer
            if client in found:
                self._report(client, round, WIDTH, f"node {sent.node} is a second client {client}")
                continue
            self._nodes[client] = sent.node
            if client in clients:
                found[client] = width
        return dict(sorted(found.items()))

    def _send(
        self,
        client: int,
        node: int,
        kind: str,
        round: int,
        records: RecordDict,
        wait: float | None = None,
    ) -> Sent:
        wait = self.deadline if wait is None else wait
        if node == UNKNOWN:
            return Sent(client, node, None, 0.0)
        message = Message(records, node, kind, ttl=wait + SLACK, group_id=str(round))
        ids = list(self.grid.push_messages([message]))
        return Sent(client, node, ids[0] if ids else None, time.monotonic() + wait)

    def _received(
        self, sent: Sent, phase: str, round: int, read: Callable[[RecordDict], T], wait: bool = True
    ) -> T | None:
        """Return what a client answered, or report why there is nothing."""
        why, pause = "it could not be reached", self.poll
        while sent.id is not None:
            for message in self.grid.pull_messages([sent.id]):
                return self._read(message, sent, phase, round, read)
            if not wait:
                return None
            if time.monotonic() > sent.deadline:
                why = f"no answer within {self.deadline:g} s"
                self._late[sent.node] = None
                break
            time.sleep(pause)
            pause = min(PATIENCE * pause, MOST_PAUSE)  # every look is work for the SuperLink
        self._report(sent.client, round, phase, _of_node(sent, why))
        return None

    def _read(
        self, message: Message, sent: Sent, phase: str, round: int, read: Callable[[RecordDict], T]
    ) -> T | None:
        try:
            if not message.has_error():
                return read(message.content)
            error = message.error
            why = REASONS.get(error.code) or error.reason or f"error {error.code}"
        except Exception as error:  # whatever a client sends, the round goes on
            why = f"its reply cannot be read: {type(error).__name__}: {error}"
        if self._late.get(sent.node) is not None:
            self._late[sent.node] = None  # to be asked anew
        self._report(sent.client, round, phase, _of_node(sent, why)[:MOST_WORDS])
        return None


def _of_node(sent: Sent, why: str) -> str:
    return f"node {sent.node}: {why}" if sent.client == UNKNOWN else why


def _call(round: int) -> RecordDict:
    return RecordDict({"task": ConfigRecord({"round": round})})


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
        return client, Absent(why[:MOST_WORDS])
    if not isinstance(width, float):
        raise ValueError(f"a width must be a number, got {width!r}")
    return client, check_capacity(width)
