"""Rounds of an algorithm over clients, with their accounts."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import reduce
from math import ceil, inf
from typing import Any

import torch

from rabo.algorithms import Algorithm, Cohort, State
from rabo.algorithms.step_limit import LIMITED
from rabo.errors import CapacityWarning, ClientError, TooFewRepliesError
from rabo.exchange.aggregation import Aggregate
from rabo.exchange.budgets import Absent, Budget, at_round, check_capacity, width_for
from rabo.exchange.cost import Cost
from rabo.exchange.state import CURVATURE, DISAGREEMENT, HYPERGRADIENT_NORM, INNER_DISAGREEMENT
from rabo.execution import Guarded, InProcess, Privacy, Private, RollCall, Runtime, Tolerance
from rabo.federation.alarms import Alarms
from rabo.federation.clients import Client, OnDemand, Problems, check_clients
from rabo.federation.ledger import Entry, Ledger
from rabo.federation.rounds import CALIBRATION, Result, Round, Snapshot, relative_cost
from rabo.pruning.channels import shapes_of
from rabo.pruning.policies import Full
from rabo.seeding import stream

# state scalars copied to the metrics
NUMBERS_OF_STEP = (
    HYPERGRADIENT_NORM,
    DISAGREEMENT,
    INNER_DISAGREEMENT,
    LIMITED,
    "beta",
    "largest_curvature",
)
MOST_PROBES = 20  # rounds in which an exchange of a kind is looked for


# numbers, and lists of them (one per class, say) that are recorded beside them
Evaluate = Callable[[State, Ledger], Mapping[str, float | Sequence[float | None]]]


class Federation:
    """Clients, an algorithm and a runtime; iterate over it to run round after round."""

    def __init__(
        self,
        clients: Sequence[Client],
        algorithm: Algorithm,
        *,
        participation: float = 1.0,
        evaluate: Evaluate | None = None,
        evaluate_every: int = 1,
        runtime: Runtime | None = None,
        compare: bool = True,
        tolerance: Tolerance | None = None,
        aggregate: Aggregate | None = None,
        privacy: Privacy | None = None,
    ):
        """Make a federation; to compare costs with the full model's, rounds of it are run here."""
        check_clients(clients)
        if not 0 < participation <= 1:
            raise ValueError(f"participation must lie in (0, 1], got {participation}")
        if evaluate_every < 1:
            raise ValueError(f"evaluate_every must be at least 1, got {evaluate_every}")
        if tolerance is not None and tolerance.min_replies > len(clients):
            raise ValueError(
                f"min_replies must be at most the number of clients, {len(clients)}, got "
                f"{tolerance.min_replies}: every round would be given up"
            )
        self.clients, self.algorithm = clients, algorithm
        self.participation, self.evaluate = participation, evaluate
        self.evaluate_every, self.compare = evaluate_every, compare
        self.template = clients[0].problem
        self.channels = self.template.channels
        self.state = self._start = algorithm.init(self.template)
        self.tolerance, self.aggregate = tolerance or Tolerance(), aggregate or Aggregate()
        runtime = runtime or InProcess(Problems(clients))
        why = needs_single_answers(participation, self.tolerance, self.aggregate, privacy)
        if why and getattr(runtime, "gives_means", False):
            raise ValueError(
                f"{type(runtime).__name__} gives no single answers, but {why}; use Recorded"
            )
        self._roll_call_of = runtime if isinstance(runtime, RollCall) else None
        if privacy is not None:
            runtime = Private(runtime, privacy)
        self._guard = Guarded(runtime, self.state.x, self.state.y, self.tolerance)
        self.ledger = Ledger(self._guard)
        self.full_cost = Cost()
        self._costs: dict[Any, Cost] = {}  # of a round, by shape and width
        self._full_costs: dict[Any, Cost] = {}  # of an exchange, by shape and kind
        self._has_full_cost = True  # not if a run began without
        is_biased = algorithm.uses_local_hessians and self.template.copies == 1
        self._alarms = Alarms(is_biased and privacy is None)  # noise makes clients disagree too
        has_policy = any(f.name == "policy" for f in fields(algorithm))  # type: ignore[arg-type]
        self._unpruned = replace(algorithm, policy=Full()) if has_policy else algorithm  # type: ignore[type-var]
        self._has_warned = False
        self._check_clients()

    def run(self, rounds: int) -> Iterator[Round]:
        """Yield one record per round; the state advances as the iteration does."""
        if not isinstance(rounds, int) or rounds < 1:
            raise ValueError(f"rounds must be a whole number of at least 1, got {rounds}")
        last = self.state.round + rounds
        if self.state.round == 0:
            self._prepare()
        while self.state.round < last:
            yield self._round(last)

    def snapshot(self) -> Snapshot:
        """Return where the run stands; call it between two rounds."""
        return Snapshot(self.state, self.ledger.books(), self.full_cost)

    def restore(self, snapshot: Snapshot) -> None:
        """Go on from a snapshot of the same run."""
        self.state, self.full_cost = snapshot.state, snapshot.full_cost
        self._has_full_cost = snapshot.full_cost != Cost() or snapshot.books.total == Cost()
        self.ledger.reopen(snapshot.books, self.state.x, self.state.y)

    def cost_at(self, client: int, width: float) -> Cost:
        """Return what a round with all its phases costs a client, measurements of l_{g,1} aside."""
        key = (self.clients[client].problem.shape_key, width)
        if key not in self._costs:
            first = getattr(self.algorithm, "warm_up", 0)
            entries = self._probe(client, width, self.algorithm, first)
            self._costs[key] = reduce(Cost.plus, (e.cost for e in entries), Cost())
        return self._costs[key]

    def _probe(
        self, client: int, width: float, algorithm: Algorithm, round: int
    ) -> Sequence[Entry]:
        """Run a round of one client alone, from the start, and return what it cost."""
        ledger = Ledger(InProcess({client: self.clients[client].problem}))
        state = replace(self._start, round=round)
        ledger.begin(state.x, state.y)
        algorithm.round(state, Cohort(self.channels, {client: width}), ledger)
        return [entry for entry in ledger.entries if entry.phase != CALIBRATION]

    def _full_cost_of_round(self) -> Cost:
        """Return what the exchanges of the round under way would have cost with the full model.

        Clients elsewhere measure it themselves. Without any such client there is no cost.
        """
        spent = [e for e in self.ledger.entries if e.phase != CALIBRATION]
        if self.compare:
            return reduce(Cost.plus, map(self._full_cost_of, spent), Cost())
        if not self._has_full_cost or all(e.full_cost is None for e in spent):
            return Cost()
        return reduce(Cost.plus, (e.full_cost or e.cost for e in spent), Cost())

    def full_costs(self, client: int, round: int) -> dict[tuple[Any, ...], Cost]:
        """Measure a client's exchanges in a round with the full model, by their kinds."""
        costs: dict[tuple[Any, ...], Cost] = {}
        for entry in self._probe(client, 1.0, self._unpruned, round):
            costs.setdefault(entry.kind, entry.cost)
        return costs

    def _full_cost_of(self, entry: Entry) -> Cost:
        """Look up the cost of one exchange; rounds differ where an algorithm draws what it does."""
        shape = self.clients[entry.client].problem.shape_key
        for round in range(entry.round, entry.round + MOST_PROBES):
            if (shape, *entry.kind) in self._full_costs:
                break
            try:
                probed = self.full_costs(entry.client, round)
            except ClientError:
                if self.tolerance.on_fault == "raise":
                    raise
                return entry.cost  # until it can be tried
            for kind, cost in probed.items():
                self._full_costs.setdefault((shape, *kind), cost)
        return self._full_costs.setdefault((shape, *entry.kind), entry.cost)

    def _prepare(self) -> None:
        present, absent = self._roll_call()
        if not present:
            fixed = all(isinstance(self.clients[i].capacity, (int, float, Budget)) for i in absent)
            if self._roll_call_of is None and fixed and self.participation == 1:
                why = next(iter(absent.values()))
                raise ValueError(f"no client can take part in any round: {why}; give them more")
            return
        self.ledger.begin(self.state.x, self.state.y)
        cohort = Cohort(self.channels, present, self.aggregate)
        with suppress(TooFewRepliesError):  # then it is measured when it is needed
            self.state = self.algorithm.prepare(self.state, cohort, self.ledger)

    def _round(self, last: int) -> Round:
        number, start = self.state.round, time.perf_counter()
        present, absent = self._roll_call()
        is_judged = self.evaluate and (
            (number + 1) % self.evaluate_every == 0 or number + 1 == last
        )
        self.ledger.begin(self.state.x, self.state.y, self.channels if is_judged else None)
        skipped = self._play(present)
        coverage = self.ledger.end()
        self.full_cost = self.full_cost.plus(self._full_cost_of_round())
        scalars = self.ledger.scalars()
        scalars.pop(CURVATURE, None)  # the state's largest_curvature replaces it
        if not skipped:
            scalars |= {n: v for n, v in self.state.scalars.items() if n in NUMBERS_OF_STEP}
            self._alarms.see(number, scalars, len(present))
        found, channels = {}, {}
        if self.evaluate and is_judged:
            found = self.evaluate(self.state, self.ledger)
            channels = self.ledger.by_channel()
        vectors = {name: value for name, value in found.items() if isinstance(value, Sequence)}
        reached = {name: value for name, value in found.items() if not isinstance(value, Sequence)}
        return Round(
            number,
            {**reached, **scalars},
            self.ledger.round_cost(),
            coverage,
            self._trained_widths(present),
            absent,
            self._guard.take_faults(),
            skipped,
            tuple(self.ledger.entries),
            self.ledger.total,
            relative_cost(self.ledger, self.full_cost),
            vectors,
            channels,
            time.perf_counter() - start,
        )

    def _play(self, present: Mapping[int, float]) -> str:
        """Let the algorithm do its round, or say why it was given up and the state stays."""
        least = self.tolerance.min_replies
        try:
            if len(present) < least:
                raise TooFewRepliesError(f"{len(present)} clients take part, {least} must")
            cohort = Cohort(self.channels, present, self.aggregate)
            self.state = self.algorithm.round(self.state, cohort, self.ledger)
        except TooFewRepliesError as error:
            self.ledger.void()
            self.state = replace(self.state, round=self.state.round + 1)
            return str(error)
        return ""

    def _roll_call(self) -> tuple[dict[int, float], dict[int, str]]:
        """Say who takes part in this round and how wide, and who sits it out and why."""
        round, chosen = self.state.round, list(range(len(self.clients)))
        if self.participation < 1:
            generator = stream(self.algorithm.seed, round, "participation")
            count = max(1, ceil(self.participation * len(chosen)))
            order = torch.randperm(len(chosen), generator=generator)[:count]
            chosen = sorted(chosen[i] for i in order.tolist())
        present: dict[int, float] = {}
        absent: dict[int, str] = {}
        for client, width in self._widths(round, chosen).items():
            if isinstance(width, Absent):
                absent[client] = width.why
            else:
                present[client] = check_capacity(width)
        self._warn_of_ignored_capacity(present)
        return present, absent

    def _trained_widths(self, present: Mapping[int, float]) -> Mapping[int, float]:
        """Return each client's trained width; 1 if the policy is Full."""
        if is_full(self.algorithm):
            return dict.fromkeys(present, 1.0)
        return present

    def _warn_of_ignored_capacity(self, present: Mapping[int, float]) -> None:
        """Warn once if the policy is Full and a capacity is below 1."""
        narrow = [client for client, width in present.items() if width < 1]
        if not narrow or self._has_warned or not is_full(self.algorithm):
            return
        self._has_warned = True
        warnings.warn(
            f"client {narrow[0]} has capacity {present[narrow[0]]:g}, but the policy of "
            f"{type(self.algorithm).__name__} is Full: every client trains the full model. Use "
            "policy='importance' (--policy importance) to train submodels, or capacities of 1",
            CapacityWarning,
            stacklevel=2,
        )

    def _widths(self, round: int, chosen: Sequence[int]) -> Mapping[int, float | Absent]:
        """Return how wide clients are: what they answer, or what fits the resources they have."""
        if self._roll_call_of is not None:
            return self._roll_call_of.widths(round, chosen)
        return {client: self._width_of(client, round) for client in chosen}

    def _width_of(self, client: int, round: int) -> float | Absent:
        now = at_round(self.clients[client].capacity, round)
        try:
            return width_for(now, lambda w: self.cost_at(client, w))
        except ClientError as error:  # at a trial of what a width costs
            if self.tolerance.on_fault == "raise":
                raise
            return Absent(str(error))

    def _check_clients(self) -> None:
        shapes = shapes_of(*self.template.start())
        known = [self.clients[0]] if isinstance(self.clients, OnDemand) else self.clients
        for i, client in enumerate(known):
            own = shapes_of(*client.problem.start())
            if own != shapes:
                raise ValueError(
                    "all clients must have parameters of the same shapes, got another problem at "
                    f"client {i}: {_first_difference(shapes, own)}"
                )
        narrow = [i for i, c in enumerate(known) if c.capacity != 1.0]
        if narrow and not self.channels.units:
            raise ValueError(
                f"client {narrow[0]} asks for less than the full model, but nothing of this "
                "problem can be cut: make x or y a module with linear layers or convolutions (a "
                "recurrent layer is kept whole), or name their axes (axes=)"
            )


def is_full(algorithm: Algorithm) -> bool:
    """Say whether all clients of an algorithm train the full model, whatever their capacity."""
    return isinstance(getattr(algorithm, "policy", None), Full)


def _first_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    name = next(n for n in [*a, *b] if a.get(n) != b.get(n))
    return f"{name} is {a.get(name)} at client 0 and {b.get(name)} there"


def needs_single_answers(
    participation: float, tolerance: Tolerance, aggregate: Aggregate, privacy: Privacy | None
) -> str:
    """Say why the answer of each client is needed for itself; "" where their sum will do."""
    needs = {
        "clip shrinks each": privacy is not None,
        "max_norm bounds each": tolerance.max_norm < inf,
        "on_fault drops each": tolerance.on_fault != "raise",
        f"aggregate {aggregate.kind} ranks them": aggregate.kind != "mean",
        "clients that take part change": participation < 1,
    }
    return next((why for why, is_so in needs.items() if is_so), "")


def result_of(federation: Federation, history: Sequence[Round]) -> Result:
    """Collect what a federation has reached."""
    state, ledger = federation.state, federation.ledger
    return Result(
        state.x,
        state.y,
        state,
        history,
        ledger.total,
        federation.full_cost,
        ledger.summary(),
        ledger,
    )
