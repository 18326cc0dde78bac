"""The cost of a client's exchanges with the full model, measured on the client.

A remote server has no data, so it cannot measure them as a run in one process does.
"""

from collections.abc import Iterator

from flwr.app import ConfigRecord, RecordDict

from rabo.algorithms import Algorithm
from rabo.errors import ClientError
from rabo.exchange.cost import Cost
from rabo.exchange.request import Request
from rabo.exchange.work import Work
from rabo.federation.clients import Client, OnDemand
from rabo.federation.federation import MOST_PROBES, Federation
from rabo.federation.ledger import kind_of
from rabo.problems.bilevel import BilevelProblem

RECORD = "full costs"  # in the records that Flower keeps on the node


def full_cost(
    client: int,
    problem: BilevelProblem,
    algorithm: Algorithm,
    work: Work,
    request: Request,
    kept: RecordDict,
) -> Cost | None:
    """Return the cost of an exchange with the full model; None if it cannot be measured.

    The client runs one round alone and keeps the costs of all its exchanges.
    """
    key = " ".join(map(str, kind_of(work, request)))
    known = kept.config_records[RECORD] if RECORD in kept else ConfigRecord()
    if key not in known:
        for found, cost in _measured(client, problem, algorithm, request.round):
            known.setdefault(" ".join(map(str, found)), [*cost[:2], *cost[3:]])
            if key in known:
                break
        known.setdefault(key, [])
        kept[RECORD] = known
    if not known[key]:
        return None
    multiply_adds, memory, down, up = known[key]  # type: ignore[misc]
    return Cost(multiply_adds, memory, 0.0, down, up)  # type: ignore[arg-type]


def _measured(
    client: int, problem: BilevelProblem, algorithm: Algorithm, round: int
) -> Iterator[tuple[tuple[object, ...], Cost]]:
    """Yield the kinds of exchanges with their costs, round after round."""
    alone = OnDemand(client + 1, lambda _: Client(problem))
    federation = Federation(alone, algorithm)
    try:
        for number in range(round, round + MOST_PROBES):
            yield from federation.full_costs(client, number).items()
    except ClientError:  # the full model does not fit, or diverges
        return
