"""What a run costs and whom it covers; wraps any runtime, so no algorithm keeps accounts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rabo.exchange.cost import Cost
from rabo.exchange.covering import Holders
from rabo.exchange.request import Reply, Request
from rabo.exchange.rows import counted
from rabo.exchange.work import Levels, Runtime, Work
from rabo.pruning.channels import Channels
from rabo.pruning.submodel import Cut, Part, Submodel
from rabo.tree import Params, lay, pieces

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
    full_cost: Cost | None = None  # with the full model, if the client says so


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
    _kept: dict[Level, list[Tensor]] = field(default_factory=dict)  # ‖θ⊙m‖ of each part
    _counted: set[tuple[Level, int]] = field(default_factory=set)
    _full: Mapping[Level, Params] = field(default_factory=dict)
    _flat: dict[Level, Tensor] = field(default_factory=dict)  # the same, side by side
    _channels: Channels | None = None  # if they are counted
    _units: dict[Level, dict[str, Tensor]] = field(default_factory=dict)  # clients, by group

    def begin(self, x: Params, y: Params, channels: Channels | None = None) -> None:
        """Open a round on the full model it starts from, and count who holds its channels."""
        self._full, self._channels = {"x": x, "y": y}, channels
        self._start_counting()
        self.entries = []

    def map(self, work: Work, requests: Iterable[Request]) -> Iterator[Reply]:
        # what is needed of a request, not its tensors
        sent: dict[int, tuple[int, Cut, int, tuple[Any, ...]]] = {}

        def watched() -> Iterator[Request]:
            for request in requests:
                cut = request.submodel
                down = _num_bytes(request.arrays, work.takes, cut)
                if "x" in request.arrays:  # charged with x, though it travels once a round
                    down += cut.x.index_bytes() + cut.y.index_bytes()
                sent[request.client] = (request.round, cut, down, kind_of(work, request))
                yield request

        for reply in self.runtime.map(work, watched()):
            if reply.fault is not None:  # nobody has dealt with it
                raise reply.fault
            client = reply.client
            round, cut, down, kind = sent[client]
            up = _num_bytes(reply.arrays, work.answers, cut) + _row_bytes(reply.rows)
            cost = reply.cost._replace(bytes_down=down, bytes_up=up)
            entry = Entry(round, client, work.name, cost, reply.scalars, kind, reply.full_cost)
            self._book(entry)
            for level in LEVELS:
                if level in reply.arrays and (level, client) not in self._counted:
                    self._counted.add((level, client))  # once, however often it is asked
                    self._holders[level].add(counted(cut.of(level), reply.rows.get(level)))
                    self._count_units(level, cut)
            yield reply

    def _start_counting(self) -> None:
        self._counted, self._units = set(), {}
        self._kept = {"x": [], "y": []}
        self._flat = {level: lay(list(self._full[level].values())) for level in LEVELS}
        self._holders = {
            level: Holders(self._flat[level], partial(self._see_part, level)) for level in LEVELS
        }

    def _count_units(self, level: Level, cut: Cut) -> None:
        if self._channels is None or not isinstance(cut.of(level), Submodel):
            return
        groups = self._channels.groups_of[level]
        start = {g: torch.zeros(self._channels.units[g], dtype=torch.int32) for g in groups}
        for group, count in self._units.setdefault(level, start).items():
            count[cut.kept[group].cpu()] += 1

    def void(self) -> None:
        """Count nothing that was trained in the round under way; what it has cost stays."""
        self._start_counting()

    def end(self) -> dict[Level, Coverage]:
        """Close the round and say what it covered; the device is read once."""
        read = torch.stack([self._count(level) for level in LEVELS]).tolist()
        return {level: self._coverage(level, *row) for level, row in zip(LEVELS, read, strict=True)}

    def by_channel(self) -> dict[Level, dict[str, list[float]]]:
        """Return how many clients trained each channel in a round that counts them, by group.

        Where single entries are cut: the mean over the entries of a row, by tensor.
        """
        return {level: self._by_channel(level) for level in LEVELS}

    def _by_channel(self, level: Level) -> dict[str, list[float]]:
        if level in self._units:
            return {group: count.tolist() for group, count in self._units[level].items()}
        if not self._kept[level]:
            return {}
        shapes = {name: tuple(value.shape) for name, value in self._full[level].items()}
        counts = pieces(self._holders[level].count(), shapes)
        return {
            f"{level}.{name}": count.double().reshape(len(count), -1).mean(1).tolist()
            for name, count in counts.items()
        }

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

    def _count(self, level: Level) -> Tensor:
        """Book who trained what; return how many entries, the fewest clients, and what masks keep.

        The last two are how many entries were ever trained, and min_i ‖θ⊙m_i‖²/‖θ‖².
        """
        count, full = self._holders[level].count(), self._flat[level]
        kept = count.new_ones((), dtype=torch.float64)
        if self._kept[level]:
            whole = torch.linalg.vector_norm(full).double()
            least = torch.stack(self._kept[level]).min().double()
            kept = torch.where(whole > 0, least / whole, 1.0).square()
        positive = count > 0
        known = self.trained[level]
        ever = positive | lay(list(known.values())) if known else positive
        if known or self._kept[level]:
            shapes = {name: tuple(value.shape) for name, value in self._full[level].items()}
            self.trained[level] = pieces(ever, shapes)
        most = torch.iinfo(count.dtype).max
        fewest = torch.where(positive, count, most).min() if count.numel() else positive.sum()
        return torch.stack([positive.sum(), fewest, ever.sum(), kept]).double()

    def _coverage(
        self, level: Level, num: float, fewest: float, num_ever: float, kept: float
    ) -> Coverage:
        minimum = int(fewest) if num else 0
        if num:
            known = self.minimum[level]
            self.minimum[level] = minimum if known is None else min(known, minimum)
        ever = num_ever / max(1, self._flat[level].numel())
        return Coverage(minimum, int(num), ever, max(0.0, 1 - kept) ** 0.5)

    def _fraction(self, level: Level) -> float:
        known = self.trained[level]
        return float(lay(list(known.values())).double().mean()) if known else 0.0

    def _see_part(self, level: Level, part: Part) -> None:
        self._kept[level].append(torch.linalg.vector_norm(part.take(self._flat[level])))


def kind_of(work: Work, request: Request) -> tuple[Any, ...]:
    """Return the work, arrays and steps of an exchange: with one width, all cost the same."""
    return work.name, *sorted(request.arrays), request.steps


def _num_bytes(arrays: Mapping[str, Params], levels: Levels, cut: Cut) -> int:
    """Return what travels: of an element mask, only the entries that are held."""
    return sum(cut.of(levels[name]).num_bytes(params) for name, params in arrays.items())


def _row_bytes(rows: Mapping[str, Mapping[str, Sequence[int]]]) -> int:
    """Return the bytes of the row numbers that travel beside the arrays."""
    return sum(4 * len(own) for tensors in rows.values() for own in tensors.values())
