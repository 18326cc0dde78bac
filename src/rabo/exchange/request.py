"""Messages of an exchange: the server's request, and the client's reply."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rabo.errors import ClientError
from rabo.exchange.cost import Cost
from rabo.pruning.submodel import Cut
from rabo.tree import Params


@dataclass(frozen=True)
class Request:
    """The server's request to one client in one exchange.

    `exchange` counts the client's exchanges in this round. Exchange 0 brings the submodel and
    clears the client's memory; the client keeps the submodel until the round ends.
    """

    client: int
    seed: int
    round: int
    submodel: Cut
    arrays: Mapping[str, Params]
    scalars: Mapping[str, float] = field(default_factory=dict)
    steps: int = 1  # local steps, where clients take different numbers of them
    exchange: int = 0


class Answer(NamedTuple):
    """Result of a piece of work; arrays named "x" and "y" train those entries of x and y.

    Numbers may stay on the device. `rows` names, by array and tensor, the rows to average; the
    server averages all rows of other tensors.
    """

    arrays: Mapping[str, Params]
    scalars: Mapping[str, Any] = {}
    rows: Mapping[str, Mapping[str, Sequence[int]]] = {}


@dataclass(frozen=True)
class Reply:
    """A client's answer and its cost, or the client's fault alone."""

    client: int
    arrays: Mapping[str, Params]
    scalars: Mapping[str, Any] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)
    fault: ClientError | None = None
    norm: float | None = None  # over all arrays, if a server-side executor took it
    rows: Mapping[str, Mapping[str, Sequence[int]]] = field(default_factory=dict)
    full_cost: Cost | None = None  # with the full model, from clients in other processes
