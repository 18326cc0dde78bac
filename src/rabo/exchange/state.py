"""What an algorithm is: a state, and a round that takes it to the next."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

from rabo.exchange.aggregation import Aggregate
from rabo.exchange.work import Runtime, Works
from rabo.problems.bilevel import BilevelProblem
from rabo.pruning.channels import Channels
from rabo.pruning.policies import MaskPolicy, Whole
from rabo.pruning.submodel import Cut
from rabo.seeding import stream
from rabo.tree import Params

CURVATURE = "curvature"  # a number of replies: a lower bound of l_{g,1}
HYPERGRADIENT_NORM = "hypergradient_norm"  # a number of the state: of the last step on x
DISAGREEMENT = "disagreement"  # ‖h_i − mean‖/‖mean‖ over clients, of the last step on x
INNER_DISAGREEMENT = "inner_disagreement"  # the same of the last changes of y
MOST_CUTS = 16  # that are kept at a time where every client has its own


@dataclass(frozen=True)
class State:
    """All that a run needs to go on: x_q, y_q and what an algorithm carries beside them."""

    round: int
    x: Params
    y: Params
    vectors: Mapping[str, Params] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Cohort:
    """Who takes part in a round, at which width, the channels they are cut along, and what becomes
    of their answers.
    """

    channels: Channels
    widths: Mapping[int, float]
    aggregate: Aggregate = field(default_factory=Aggregate)


class Algorithm(Protocol):
    """A published method: frozen choices, no accounts, no sockets."""

    paper: ClassVar[str]  # authors, title, where and when
    kind: ClassVar[str]  # bilevel or single level, submodels or full model
    exchanges: ClassVar[str]  # per round, in the letters of its docstring
    vectors: ClassVar[str]  # the names of what travels
    second_order: ClassVar[bool]  # whether clients take second derivatives
    needs_one_y: ClassVar[bool]  # whether it cannot train copies of y, one per task
    is_episodic: ClassVar[bool]  # whether it is for few-shot tasks alone

    @property
    def uses_local_hessians(self) -> bool:
        """Whether every client inverts its own Hessian, which is biased where clients differ."""
        ...

    @property
    def works(self) -> Works:
        """The works of this algorithm by name; rounds send no others."""
        ...

    @property
    def seed(self) -> int: ...

    def init(self, problem: BilevelProblem) -> State: ...

    def prepare(self, state: State, cohort: Cohort, runtime: Runtime) -> State:
        """Measure what the run needs before its first round, and warn of what will fail."""
        ...

    def round(self, state: State, cohort: Cohort, runtime: Runtime) -> State: ...


class Cuts(Mapping[int, Cut]):
    """The cut of every client, made when asked for; the same tensors are extracted once.

    Cuts that clients do not share are made again rather than kept when there are many: their
    memory does not grow with the number of clients.
    """

    def __init__(self, policy: MaskPolicy, state: State, cohort: Cohort, seed: int):
        self.aggregate = cohort.aggregate
        self._policy, self._shared, self._round, self._seed = (
            policy,
            policy.shared,
            state.round,
            seed,
        )
        self._whole = Whole(cohort.channels, state.x, state.y, cohort.widths)
        self._widths = dict(sorted(cohort.widths.items()))  # sums then have one order
        self._made: dict[float, Cut] = {}  # by width where it is shared, by client where not
        self.answered: Counter[int] = Counter()  # exchanges of this round, by client

    def extract(self, level: Literal["x", "y"], full: Params) -> Callable[[int], Params]:
        """Return what each client gets of full tensors, extracted once per cut."""
        made: dict[int, Params] = {}

        def part_of(client: int) -> Params:
            part = self[client].of(level)
            if not self._shared:  # nobody else needs it: nothing is kept
                return part.extract(full)
            if id(part) not in made:
                made[id(part)] = part.extract(full)
            return made[id(part)]

        return part_of

    def __getitem__(self, client: int) -> Cut:
        width = self._widths[client]
        key = width if self._shared else client
        if key not in self._made:
            if not self._shared and len(self._made) >= MOST_CUTS:
                del self._made[next(iter(self._made))]
            generator = stream(self._seed, self._round, client, "mask")
            self._made[key] = self._policy(self._whole, width, client, self._round, generator)
        return self._made[key]

    def __iter__(self) -> Iterator[int]:
        return iter(self._widths)

    def __len__(self) -> int:
        return len(self._widths)


def spread(y: Params, copies: int) -> Params:
    """Give every copy of y (one per task) the same start."""
    return y if copies == 1 else {k: v.expand(copies, *v.shape) for k, v in y.items()}
