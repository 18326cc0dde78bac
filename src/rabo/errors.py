"""The few ways in which things go wrong, each with what to do next."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeVar

T = TypeVar("T")
NONE: Mapping[str, Any] = MappingProxyType({})

DIVERGENCE_REMEDY = (
    "Use beta='auto' if beta is a number, reduce alpha, or limit the steps on x "
    "(max_outer_step=0.1). If the clients' data differ, use algorithm='simrabo', or RABO with "
    "hessian='global', because local Hessians bias the hypergradient. rabo.check(clients) shows "
    "the cause"
)


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


class CapacityWarning(UserWarning):
    """Capacities below 1 that the mask policy of the algorithm ignores."""


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


def lookup(
    kind: str, name: str, known: Mapping[str, T], synonyms: Mapping[str, Sequence[str]] = NONE
) -> T:
    """Find a registered name, or say which one was probably meant.

    Synonyms are the names of other software, each with the names that stand for it here.
    """
    if name in known:
        return known[name]
    close = [meant for meant in synonyms.get(name, ()) if meant in known]
    close = close or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    raise ValueError(f"unknown {kind} {name!r}.{hint} Known: {', '.join(sorted(known))}.")


@contextmanager
def needs(extra: str, purpose: str) -> Iterator[None]:
    """Name the extra to install where an import inside the block fails.

    Example::

        with needs("compare", "figures"):
            from matplotlib.figure import Figure
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "a package").partition(".")[0]
        advice = f"{purpose} need {package}: pip install 'rabo[{extra}]'"
        raise ImportError(advice, name=error.name) from error
