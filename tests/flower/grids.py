"""A Flower grid in this process: what travels is written and read, and nodes forget all else."""

from itertools import count

from flwr.app import Message, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.supercore.task_identity import TaskIdentity

from rabo.flower.messages import ROWS, WIDTH, fault_records, unpack
from rabo.flower.runtime import width_records
from rabo.flower.worker import Worker
from rabo.tree import squared_norm


def travel(content):
    """Through bytes and back."""
    proto = recorddict_to_proto(content)
    return recorddict_from_proto(type(proto).FromString(proto.SerializeToString()))


class FakeGrid:
    """Nodes 100, 101, ... hold clients 0, 1, ...; every message meets a new process."""

    def __init__(self, problems, algorithm, widths=None, privacy=None, compare=True):
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1  # the server's
        self.problems, self.algorithm, self.privacy = problems, algorithm, privacy
        self.compare = compare
        self.algorithms = {}  # of clients that have another one
        self.nodes = {100 + client: client for client in problems}
        self.widths = dict(widths or dict.fromkeys(problems, 1.0))
        self.kept = {client: RecordDict() for client in problems}
        self.replies, self.ids, self.seen, self.norms = {}, count(), [], []

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        return [self._deliver(message) for message in messages]

    def pull_messages(self, message_ids):
        return [self.replies.pop(i) for i in message_ids if i in self.replies]

    def _deliver(self, message):
        identity = str(next(self.ids))
        reply = self.answer(self.nodes[message.metadata.dst_node_id], message)
        if reply is not None:
            self.replies[identity] = reply
        return identity

    def answer(self, client, message):
        kind, content = message.metadata.message_type, travel(message.content)
        self.seen.append((client, kind, message.content))
        if kind == WIDTH:
            return Message(width_records(client, self.widths[client]), reply_to=message)
        algorithm = self.algorithms.get(client, self.algorithm)
        worker = Worker(client, self.problems[client], algorithm)
        try:
            kept = self.kept[client]
            found = worker.answer(content, kept, self.privacy, self.compare)
        except Exception as error:
            found = fault_records(error)
        self.kept[client] = travel(self.kept[client])
        if "fault" not in found and (arrays := unpack("reply", found)):
            own = {name: part for name, part in arrays.items() if not name.startswith(ROWS)}
            self.norms.append(squared_norm(own).sqrt())
        return Message(travel(found), reply_to=message)
