"""What a run costs and whom it covers; wraps any runtime, so no algorithm keeps accounts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rabo.covering import Holders, kept_fractions
from rabo.metering import Cost
from rabo.runtimes.base import Reply, Runtime, Task, Work
from rabo.submodel import Cut, Part, level_of
from rabo.tree import Params

Level = Literal["x", "y"]
LEVELS: tuple[Level, Level] = ("x", "y")


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
    _holders: dict[Level, Holders] = field(default_factory=dict)
    _least_kept: dict[Level, float] = field(default_factory=dict)
    _counted: set[tuple[Level, int]] = field(default_factory=set)
    _full: Mapping[Level, Params] = field(default_factory=dict)

    def begin(self, x: Params, y: Params) -> None:
        """Open a round on the full model it starts from."""
        self._full = {"x": x, "y": y}
        self._start_counting()
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
            for level in LEVELS:
                if level in reply.arrays and (level, client) not in self._counted:
                    self._counted.add((level, client))  # once, however often it is asked
                    self._holders[level].add(getattr(cut, level))
            yield client, reply

    def _start_counting(self) -> None:
        self._counted = set()
        self._least_kept = {"x": 1.0, "y": 1.0}
        self._holders = {level: Holders(partial(self._see_parts, level)) for level in LEVELS}

    def void(self) -> None:
        """Count nothing that was trained in the round under way; what it has cost stays."""
        self._start_counting()

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
        full, trained = self._full[level], self.trained[level]
        counts = self._holders[level].count()
        stats = []
        for name, count in counts.items():
            positive = count > 0
            trained[name] = trained[name] | positive if name in trained else positive
            least = torch.where(positive, count, torch.inf).min()
            stats.append(torch.stack([positive.sum().double(), least.double()]))
        read = torch.stack(stats).tolist() if stats else []  # the device is read once
        number = sum(
            int(held) * (full[name].numel() // max(1, counts[name].numel()))
            for name, (held, _) in zip(counts, read, strict=True)
        )
        minimum = int(min((least for held, least in read if held), default=0))
        if number:
            known = self.minimum[level]
            self.minimum[level] = minimum if known is None else min(known, minimum)
        noise = max(0.0, 1 - self._least_kept[level]) ** 0.5
        return Coverage(minimum, number, self._fraction(level), noise)

    def _fraction(self, level: Level) -> float:
        full, trained = self._full.get(level, {}), self.trained[level]
        total = sum(value.numel() for value in full.values())
        held = torch.stack([t.sum() for t in trained.values()]).tolist() if trained else []
        sizes = (full[name].numel() // t.numel() for name, t in trained.items())
        return sum(h * size for h, size in zip(held, sizes, strict=True)) / max(1, total)

    def _see_parts(self, level: Level, parts: Sequence[Part]) -> None:
        kept = min(kept_fractions(parts, self._full[level]))
        self._least_kept[level] = min(self._least_kept[level], kept)


def _num_bytes(arrays: Mapping[str, Params], cut: Cut) -> int:
    """Return what travels: of an element mask, only the entries that are held."""
    parts = {"x": cut.x, "y": cut.y}
    return sum(parts[level_of(name)].num_bytes(params) for name, params in arrays.items())
