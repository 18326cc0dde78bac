"""The few ways in which things go wrong, each with what to do next."""

import difflib
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


class NonFiniteError(ArithmeticError):
    """A loss, a gradient or a hypergradient was NaN or infinite."""


class UnsupportedModelError(ValueError):
    """A model whose channels cannot be cut without changing what it computes."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be gone on from; says why."""


class ReplyError(ValueError):
    """A reply that must not be used; says why."""


class TooFewRepliesError(RuntimeError):
    """So few clients answered that a round is given up."""


class ClientError(RuntimeError):
    """Work failed on a client; says which client, in which round (counted from 1), at what.

    `round` counts from 0, as in all records.
    """

    def __init__(self, client: int, round: int, work: str, cause: BaseException):
        super().__init__(
            f"client {client} failed in round {round + 1} at {work}: "
            f"{type(cause).__name__}: {cause}"
        )
        self.client, self.round, self.work, self.cause = client, round, work, cause


def lookup(kind: str, name: str, known: Mapping[str, T]) -> T:
    """Find a registered name, or say which one was probably meant."""
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"unknown {kind} {name!r}.{hint} Known: {', '.join(sorted(known))}.")
