"""What the server accepts from clients, and what it does about the rest."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rabo.errors import DIVERGENCE_REMEDY, ClientError, ReplyError, TooFewRepliesError
from rabo.exchange.cost import Cost
from rabo.exchange.request import Reply, Request
from rabo.exchange.work import Levels, Runtime, Work
from rabo.pruning.submodel import Cut
from rabo.tree import Params, squared_norm


class Fault(NamedTuple):
    """An answer that was asked for and not used."""

    round: int
    client: int
    phase: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """What a run puts up with.

    A client that fails, or whose reply must not be used, ends the run (`on_fault="raise"`: errors
    are seen) or is left out ("drop"). A client that is silent is always left out. Where fewer than
    `min_replies` of the clients that were asked answer, the round is given up: x, y and all else
    stay as they were, and the next round begins.
    """

    on_fault: Literal["raise", "drop"] = "raise"
    min_replies: int = 1  # in every exchange
    max_norm: float = inf  # of a reply, over all its arrays

    def __post_init__(self) -> None:
        if self.on_fault not in ("raise", "drop"):
            raise ValueError(f"on_fault must be raise or drop, got {self.on_fault!r}")
        if self.min_replies < 1:
            raise ValueError(f"min_replies must be at least 1, got {self.min_replies}")
        if not self.max_norm > 0:
            raise ValueError(f"max_norm must be positive, got {self.max_norm}")


class Guarded:
    """Checks every reply of a runtime before anybody sees it, one at a time."""

    def __init__(self, runtime: Runtime, x: Params, y: Params, tolerance: Tolerance):
        self.runtime, self.tolerance = runtime, tolerance
        self.faults: list[Fault] = []  # until somebody takes them
        full = {"x": x, "y": y}
        self._dtypes = {
            level: {k: v.dtype for k, v in tree.items()} for level, tree in full.items()
        }

    def map(self, work: Work, requests: Iterable[Request]) -> Iterator[Reply]:
        waiting: dict[int, tuple[int, Cut]] = {}
        num_asked = num_accepted = 0

        def sent() -> Iterator[Request]:
            nonlocal num_asked
            for request in requests:
                num_asked += 1
                waiting[request.client] = (request.round, request.submodel)
                yield request

        round = 0
        for reply in self.runtime.map(work, sent()):
            client = reply.client
            if client not in waiting:  # nobody asked, or it has answered
                self._refuse(round, client, work, ReplyError("it was not asked"))
                continue
            round, cut = waiting.pop(client)
            wrong = self._look(work, cut, reply)
            if wrong is None:
                num_accepted += 1
                yield reply
            else:
                self._refuse(round, client, work, wrong)
        for client, (round, _) in waiting.items():
            self.faults.append(Fault(round, client, work.name, "it did not answer"))
        if num_accepted < min(self.tolerance.min_replies, num_asked):
            raise TooFewRepliesError(
                f"{num_accepted} of {num_asked} clients answered {work.name}, "
                f"{self.tolerance.min_replies} must"
            )

    def take_faults(self) -> tuple[Fault, ...]:
        """Return what happened since the last time."""
        taken, self.faults = tuple(self.faults), []
        return taken

    def _refuse(self, round: int, client: int, work: Work, wrong: Exception) -> None:
        if self.tolerance.on_fault == "raise":
            if isinstance(wrong, ClientError):
                raise wrong
            raise ClientError(client, round, work.name, wrong) from wrong
        cause = wrong.cause if isinstance(wrong, ClientError) else wrong
        why = str(cause) if isinstance(cause, ReplyError) else f"{type(cause).__name__}: {cause}"
        self.faults.append(Fault(round, client, work.name, why))

    def _look(self, work: Work, cut: Cut, reply: Reply) -> Exception | None:
        """Say what is wrong with a reply, if anything."""
        try:
            if not isinstance(reply.cost, Cost):
                raise ReplyError("its cost must be a Cost")
            if reply.fault is not None:
                return reply.fault
            _same_names("arrays", work.answers, reply.arrays)
            for name, params in reply.arrays.items():
                level = work.answers[name]
                shapes = cut.of(level).tensor_shapes
                _same_names(f"tensors of {name}", shapes, params)
                for key, value in params.items():
                    _check_tensor(f"{name}.{key}", value, shapes[key], self._dtypes[level][key])
            _check_rows(reply, cut, work.answers)
            _same_names("scalars", work.numbers, reply.scalars)
            _check_numbers(reply.scalars, -inf)
            for cost in (reply.cost, reply.full_cost or Cost()):
                _check_numbers(cost._asdict(), 0)
            self._check_norm(reply)
        except ReplyError as error:
            return error
        except Exception as error:  # a hostile reply may be anything
            return ReplyError(f"it cannot be read ({type(error).__name__}: {error})")
        return None

    def _check_norm(self, reply: Reply) -> None:
        norm = reply.norm
        if norm is None:
            norm = float(squared_norm(reply.arrays)) ** 0.5 if any(reply.arrays.values()) else 0.0
        if not norm <= self.tolerance.max_norm or norm == inf:
            most = self.tolerance.max_norm
            limit = "" if most == inf else f" and at most {most:g}"
            hint = "" if isfinite(norm) else f": the run diverges. {DIVERGENCE_REMEDY}"
            raise ReplyError(f"its norm must be finite{limit}, got {norm:g}{hint}")


def _same_names(what: str, wanted: Iterable[str], found: Any) -> None:
    if not isinstance(found, Mapping) or set(found) != set(wanted):
        got = ", ".join(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
        raise ReplyError(f"its {what} must be {', '.join(wanted) or 'none'}, got {got or 'none'}")


def _check_tensor(name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        raise ReplyError(f"{name} must be a dense tensor, got {type(value).__name__}")
    if tuple(value.shape) != shape or value.dtype != dtype:
        raise ReplyError(
            f"{name} must be {dtype} of shape {shape}, got {value.dtype} of {tuple(value.shape)}"
        )


def _check_rows(reply: Reply, cut: Cut, levels: Levels) -> None:
    """Check that `rows` refers to rows of the reply's arrays."""
    for name, tensors in reply.rows.items():
        if name not in reply.arrays:
            raise ReplyError(f"its rows must belong to an array of the reply, got rows of {name}")
        shapes = cut.of(levels[name]).tensor_shapes
        for key, rows in tensors.items():
            number = shapes[key][0] if shapes.get(key) else 0
            if not all(type(row) is int and 0 <= row < number for row in rows):
                raise ReplyError(f"its rows of {name}.{key} must lie in 0..{number - 1}")


def _check_numbers(numbers: Mapping[str, Any], least: float) -> None:
    for name, value in numbers.items():
        if not isinstance(value, (int, float)) or not isfinite(value) or value < least:
            raise ReplyError(f"{name} must be a finite number, at least {least:g}, got {value!r}")
