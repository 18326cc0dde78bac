"""Clients: a share of the problem, and what they have."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rabo.exchange.budgets import Budget, Resources, check_capacity
from rabo.problems.bilevel import BilevelProblem
from rabo.problems.problem import Problem


@dataclass(frozen=True, eq=False)
class Client:
    """One client: its share of the problem and what it has.

    `capacity` is a width fraction in (0, 1], a `Budget`, a list with one of these per round, or a
    function of the round, counted from 0.
    """

    problem: BilevelProblem
    capacity: Resources = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.problem, Problem):
            raise ValueError(
                "a client needs data: bind them with problem.on(inner=..., outer=...), or with "
                "problem.on(data) where there is one loss, got a Problem without any"
            )
        if isinstance(self.capacity, (int, float)):
            check_capacity(self.capacity)
        elif isinstance(self.capacity, str):
            raise ValueError(
                f"a capacity must be a number in (0, 1] or a Budget, got the text {self.capacity!r}"
            )
        elif isinstance(self.capacity, Sequence):
            if not self.capacity:
                raise ValueError("a trace of capacities must have at least one entry, got none")
            for entry in self.capacity:
                if not isinstance(entry, Budget):
                    check_capacity(entry)


def check_clients(clients: Any) -> None:
    """Refuse anything but a list of at least one `Client`."""
    is_single = isinstance(clients, Client)
    if not is_single and not len(clients):
        raise ValueError("there must be at least one client, got an empty list")
    if is_single or not isinstance(clients[0], Client):
        got = "a single Client" if is_single else f"a list of {type(clients[0]).__name__}"
        raise ValueError(
            "clients must be a list of clients, each rabo.Client(problem.on(...), capacity), "
            f"got {got}"
        )


class OnDemand(Sequence[Client]):
    """Many clients, each made by `make(i)` whenever it is asked for and not kept."""

    def __init__(self, number: int, make: Callable[[int], Client]):
        if number < 1:
            raise ValueError(f"there must be at least one client, got {number}")
        self.number, self.make = number, make

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, client: Any) -> Any:
        if not 0 <= client < self.number:
            raise IndexError(client)
        return self.make(client)


class Problems(Mapping[int, BilevelProblem]):
    """The problems of clients, taken from them when they are asked for."""

    def __init__(self, clients: Sequence[Client]):
        self.clients = clients

    def __getitem__(self, client: int) -> BilevelProblem:
        return self.clients[client].problem

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.clients)))

    def __len__(self) -> int:
        return len(self.clients)
