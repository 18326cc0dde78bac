"""What a run costs and whom it covers; wraps any runtime, so no algorithm keeps accounts."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rabo.metering import Cost
from rabo.runtimes.base import Reply, Runtime, Task, Work
from rabo.submodel import Cut, Part, level_of
from rabo.tree import Params, squared_norm

Level = Literal["x", "y"]


class Entry(NamedTuple):
    """One exchange with one client."""

    round: int
    client: int
    phase: str
    cost: Cost
    scalars: Mapping[str, float]
    kind: tuple[Any, ...] = ()  # what was asked, sent and how many steps: at one width, one cost


class Coverage(NamedTuple):
    """Who trained what in one round, for x or for y."""

    minimum: int  # min_s C^s_q over trained entries s
    num_trained: int  # |K_q|
    ever_trained: float  # fraction of entries trained in any round so far
    mask_noise: float  # w: max_i ‖θ − θ⊙m_i‖ / ‖θ‖


class Books(NamedTuple):
    """What a ledger carries from round to round."""

    total: Cost
    by_phase: Mapping[str, Cost]
    trained: Mapping[Level, Params]  # which entries, ever
    minimum: Mapping[Level, int | None]  # C*


@dataclass
class Ledger:
    """Counts bytes exactly from what travels, adds up what clients measured, follows coverage."""

    runtime: Runtime
    total: Cost = field(default_factory=Cost)
    by_phase: dict[str, Cost] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)  # of the round under way
    trained: dict[Level, dict[str, Tensor]] = field(default_factory=lambda: {"x": {}, "y": {}})
    minimum: dict[Level, int | None] = field(default_factory=lambda: {"x": None, "y": None})
    _parts: dict[Level, Counter[Part]] = field(default_factory=dict)
    _full: Mapping[Level, Params] = field(default_factory=dict)

    def begin(self, x: Params, y: Params) -> None:
        """Open a round on the full model it starts from."""
        self._full = {"x": x, "y": y}
        self._parts = {"x": Counter(), "y": Counter()}
        self.entries = []

    def map(self, work: Work, tasks: Iterable[tuple[int, Task]]) -> Iterator[tuple[int, Reply]]:
        # what is needed of a task, not its tensors
        sent: dict[int, tuple[int, Cut, int, tuple[Any, ...]]] = {}

        def watched() -> Iterator[tuple[int, Task]]:
            for client, task in tasks:
                down = _num_bytes(task.arrays, task.cut)
                if "x" in task.arrays:  # x travels with its cut; clients keep both for the round
                    down += task.cut.x.index_bytes() + task.cut.y.index_bytes()
                kind = (work.__name__, *sorted(task.arrays), task.num_steps)
                sent[client] = (task.round, task.cut, down, kind)
                yield client, task

        for client, reply in self.runtime.map(work, watched()):
            if reply.fault is not None:  # nobody has dealt with it
                raise reply.fault
            round, cut, down, kind = sent[client]
            up = _num_bytes(reply.arrays, cut)
            cost = reply.cost._replace(bytes_down=down, bytes_up=up)
            self._book(Entry(round, client, work.__name__, cost, reply.scalars, kind))
            if "x" in reply.arrays:
                self._parts["x"][cut.x] += 1
            if "y" in reply.arrays:
                self._parts["y"][cut.y] += 1
            yield client, reply

    def void(self) -> None:
        """Count nothing that was trained in the round under way; what it has cost stays."""
        self._parts = {"x": Counter(), "y": Counter()}

    def end(self) -> dict[Level, Coverage]:
        """Close the round and say what it covered."""
        return {"x": self._coverage("x"), "y": self._coverage("y")}

    def round_cost(self) -> Cost:
        """Return what the round under way has cost so far."""
        cost = Cost()
        for entry in self.entries:
            cost = cost.plus(entry.cost)
        return cost

    def scalars(self) -> dict[str, float]:
        """Return the mean over clients of every number they sent along this round."""
        sent: dict[str, list[float]] = {}
        for entry in self.entries:
            for name, value in entry.scalars.items():
                sent.setdefault(name, []).append(value)
        return {name: sum(values) / len(values) for name, values in sent.items()}

    def summary(self) -> dict[str, Any]:
        """Return coverage over the whole run: C*_x, C*_y and the fraction ever trained."""
        return {
            "x_min": self.minimum["x"] or 0,
            "y_min": self.minimum["y"] or 0,
            "x_trained": self._fraction("x"),
            "y_trained": self._fraction("y"),
        }

    def books(self) -> Books:
        """Return what was booked so far; call it between two rounds."""
        trained: dict[Level, Params] = {level: dict(tree) for level, tree in self.trained.items()}
        return Books(self.total, dict(self.by_phase), trained, dict(self.minimum))

    def reopen(self, books: Books, x: Params, y: Params) -> None:
        """Go on from books of the same run, with the full model they were closed on."""
        self.begin(x, y)
        self.total, self.by_phase = books.total, dict(books.by_phase)
        self.trained = {level: dict(tree) for level, tree in books.trained.items()}
        self.minimum = dict(books.minimum)

    def ever_trained(self, level: Level, params: Params) -> dict[str, Tensor]:
        """Return parameters with zeros where nobody has ever trained them.

        Departs from lines 16 and 29, under which such entries keep their random start and ruin the
        full model: a submodel of the trained entries is what the clients optimised.
        """
        trained = self.trained[level]
        if not trained:  # a level that no client trains is what it was given as
            return dict(params)
        return {name: value * trained.get(name, 0) for name, value in params.items()}

    def _book(self, entry: Entry) -> None:
        self.entries.append(entry)
        self.total = self.total.plus(entry.cost)
        self.by_phase[entry.phase] = self.by_phase.get(entry.phase, Cost()).plus(entry.cost)

    def _coverage(self, level: Level) -> Coverage:
        parts, full = self._parts[level], self._full[level]
        counts: dict[str, Tensor] = {}
        for part, times in parts.items():
            for name, held in part.held().items():
                counts[name] = counts.get(name, torch.zeros_like(held)) + times * held
        trained = self.trained[level]
        least, number = [], 0
        for name, count in counts.items():
            positive = count > 0
            trained[name] = trained.get(name, torch.zeros_like(positive)) | positive
            number += int(positive.sum()) * (full[name].numel() // max(1, count.numel()))
            if number and positive.any():
                least.append(int(count[positive].min()))
        minimum = min(least, default=0)
        if least:
            known = self.minimum[level]
            self.minimum[level] = minimum if known is None else min(known, minimum)
        return Coverage(minimum, number, self._fraction(level), self._noise(level))

    def _fraction(self, level: Level) -> float:
        full = self._full.get(level, {})
        total = sum(value.numel() for value in full.values())
        held = sum(
            int(t.sum()) * full[n].numel() // t.numel() for n, t in self.trained[level].items()
        )
        return held / total if total else 0.0

    def _noise(self, level: Level) -> float:
        full = self._full[level]
        total = float(squared_norm(full)) if full else 0.0
        kept = [float(squared_norm(part.extract(full))) for part in self._parts[level] if total]
        return max([0.0, *(1 - k / total for k in kept)]) ** 0.5


def _num_bytes(arrays: Mapping[str, Params], cut: Cut) -> int:
    """Return what travels: of an element mask, only the entries that are held."""
    parts = {"x": cut.x, "y": cut.y}
    return sum(parts[level_of(name)].num_bytes(params) for name, params in arrays.items())
