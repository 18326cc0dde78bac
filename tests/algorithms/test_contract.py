"""What every registered algorithm keeps, whatever it does in a round."""

from dataclasses import fields, replace

import pytest
import torch

import rabo
from known_problems import episodic_problem
from rabo.algorithms import ALGORITHMS, Cohort, State
from rabo.errors import ClientError
from rabo.exchange.cost import Meter
from rabo.exchange.work import perform
from rabo.execution import InProcess
from rabo.federation.ledger import Ledger
from rabo.federation.rounds import CALIBRATION
from rabo.pruning.policies import Full
from rabo.pruning.submodel import ElementMask
from rabo.seeding import stream
from rabo.tasks.quadratic import Quadratic, random_quadratic
from rabo.tree import is_finite

NAMES = [*sorted(ALGORITHMS), "fednest, all options"]
WIDTHS = {0: 1.0, 1: 0.5, 2: 0.3, 3: 1.0}
# what an algorithm needs beside its defaults; those that are not listed need nothing
OPTIONS = {
    "rabo": {"num_inner_steps": 2},
    "fednest": {"num_inner_steps": 2, "num_local_steps": 2, "num_terms": 4},
    "fedmbo": {"num_inner_steps": 2, "num_terms": 4},
    "aggitd": {"num_inner_steps": 3, "num_local_steps": 2},
    "fednest, all options": {
        "num_inner_steps": 2,
        "num_local_steps": 2,
        "num_local_steps_x": 3,
        "num_terms": 3,
        "series": "truncated",
        "snapshot": "full",
        "separate_clients": True,
    },
}
# exchanges of a round whose number is not that of `exchanges`: with T, N and N' < N of OPTIONS
EXCHANGES = {
    "aggitd": lambda round: {2 * 3 + 2},
    "fedbioacc": lambda round: {1 if round else 2},
    "fedmbo": lambda round: {2 + n + 2 for n in range(4)},
    "fednest": lambda round: {2 * 2 + n + 3 for n in range(4)},
    "fednest, all options": lambda round: {2 * 2 + 2 + 3},  # a truncated series draws no N'
}


def noisy_quadratics():
    family = random_quadratic(stream(0, "family"), 5, 4, condition=3.0)
    return {i: family.client(stream(0, i), sigma_f=0.1, sigma_g=0.1) for i in WIDTHS}


# the clients of an algorithm that makes sense on certain problems only
PROBLEMS = dict.fromkeys(
    ("dist-protonet", "dist-maml"), lambda: {i: episodic_problem(i) for i in WIDTHS}
)


def problems_of(name):
    return PROBLEMS.get(name, noisy_quadratics)()


def kind_of(name):
    return ALGORITHMS[name.partition(",")[0]]


def make(name, **options):
    kind = kind_of(name)
    policy = (getattr(kind, "own_policy", None) or rabo.Random)()
    options = {"alpha": 0.05, "policy": policy, **OPTIONS.get(name, {}), **options}
    known = {option.name for option in fields(kind)}
    return kind(**{key: value for key, value in options.items() if key in known})


class Session:
    """Rounds of an algorithm, one at a time, on any runtime."""

    def __init__(self, algorithm, problems, runtime=None, widths=None):
        first = problems[min(problems)]
        self.algorithm, self.ledger = algorithm, Ledger(runtime or InProcess(problems))
        self.cohort = Cohort(first.channels, widths or WIDTHS)
        state = algorithm.init(first)
        self.ledger.begin(state.x, state.y)
        self.state = algorithm.prepare(state, self.cohort, self.ledger)

    def play(self, rounds):
        for _ in range(rounds):
            self.ledger.begin(self.state.x, self.state.y)
            self.state = self.algorithm.round(self.state, self.cohort, self.ledger)
        return self.state


def assert_same(a, b):
    assert (a.round, a.scalars) == (b.round, b.scalars)
    trees_a, trees_b = ({"x": s.x, "y": s.y, **s.vectors} for s in (a, b))
    assert trees_a.keys() == trees_b.keys()
    for name, tree in trees_a.items():
        for key, value in tree.items():
            assert torch.equal(value, trees_b[name][key]), (name, key)


class SecondDerivativeError(Exception):
    """A slope was differentiated."""


class Slope(torch.autograd.Function):
    """Pass a slope on, and refuse to differentiate it."""

    @staticmethod
    def forward(ctx, slope):
        return slope.view_as(slope)

    @staticmethod
    def backward(ctx, slope):
        raise SecondDerivativeError


class Identity(torch.autograd.Function):
    """Pass a tensor on. Its backward pass may be taken, but not differentiated."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, slope):
        return Slope.apply(slope)


def once(tree):
    return {name: Identity.apply(value) for name, value in tree.items()}


class OnceDifferentiable(Quadratic):
    """Quadratic losses that refuse second derivatives."""

    def inner(self, z, y, part):
        return super().inner(once(z), once(y), part)

    def outer(self, z, y, part):
        return super().outer(once(z), once(y), part)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in PROBLEMS])
def test_only_second_order_algorithms_take_second_derivatives(name):
    problems = {i: OnceDifferentiable(p.coefficients) for i, p in noisy_quadratics().items()}

    def rounds():
        return Session(make(name, beta=0.1), problems).play(2)

    if kind_of(name).second_order:
        with pytest.raises((ClientError, SecondDerivativeError)) as raised:
            rounds()
        assert isinstance(getattr(raised.value, "cause", raised.value), SecondDerivativeError)
    else:
        state = rounds()
        assert is_finite(state.x)
        assert is_finite(state.y)


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_fixes_every_draw(name):
    first, second = (Session(make(name), problems_of(name)).play(3) for _ in range(2))
    assert_same(first, second)
    other = Session(make(name, seed=1), problems_of(name)).play(3)
    pairs = [(first.x, other.x), (first.y, other.y)]
    assert not all(torch.equal(v, b[k]) for a, b in pairs for k, v in a.items())


class Backwards(InProcess):
    """Runs the last client first and answers in the order it promises."""

    def map(self, work, requests):
        backwards = list(requests)[::-1]
        replies = [perform(work, r, self.context(r), Meter()) for r in backwards]
        yield from replies[::-1]


@pytest.mark.parametrize("name", NAMES)
def test_neither_the_order_of_clients_nor_that_of_their_work_changes_a_bit(name):
    problems = problems_of(name)
    plain = Session(make(name), problems).play(3)
    backwards = dict(reversed(list(problems.items())))
    widths = dict(reversed(list(WIDTHS.items())))
    assert_same(plain, Session(make(name), backwards, widths=widths).play(3))
    assert_same(plain, Session(make(name), problems, Backwards(problems)).play(3))


class Unreliable(InProcess):
    """In one exchange, some clients are not reached."""

    def __init__(self, problems, exchange, missing):
        super().__init__(problems)
        self.exchange, self.missing, self.calls, self.met = exchange, missing, 0, False

    def map(self, work, requests):
        if work.name == CALIBRATION:
            return super().map(work, requests)
        self.calls += 1
        if self.calls != self.exchange:
            return super().map(work, requests)
        self.met = True
        return super().map(work, (r for r in requests if r.client not in self.missing))


@pytest.mark.parametrize("missing", [{2}, {0}, set(WIDTHS)], ids=["narrow", "wide", "all"])
@pytest.mark.parametrize("name", NAMES)
def test_a_round_goes_on_whoever_is_missing_in_any_exchange(name, missing):
    problems, algorithm = problems_of(name), make(name)
    exchange, more = 0, True
    while more:
        exchange += 1
        runtime = Unreliable(problems, exchange, missing)
        session = Session(algorithm, problems, runtime)
        state = session.play(1)
        more = runtime.met
        state = session.play(1)
        assert state.round == 2
        assert is_finite([state.x, state.y, state.vectors])
        assert all(abs(value) < float("inf") for value in state.scalars.values())
    assert exchange > 1


@pytest.mark.parametrize("name", NAMES)
def test_capacity_1_equals_no_masks_bit_for_bit(name):
    problems, full = problems_of(name), dict.fromkeys(WIDTHS, 1.0)
    states = [
        Session(make(name, **policy), problems, widths=full).play(3)
        for policy in ({}, {"policy": Full()})
    ]
    assert_same(*states)


def saved(state):
    """Plain numbers and tensors, as a file would hold them."""
    trees = {"x": state.x, "y": state.y, **{f"vectors.{k}": v for k, v in state.vectors.items()}}
    tensors = {f"{name}/{k}": v.clone() for name, tree in trees.items() for k, v in tree.items()}
    return {
        "round": int(state.round),
        "scalars": {k: float(v) for k, v in state.scalars.items()},
    } | {"tensors": tensors}


def loaded(file):
    trees = {}
    for path, tensor in file["tensors"].items():
        name, key = path.split("/", 1)
        trees.setdefault(name, {})[key] = tensor
    x, y = trees.pop("x"), trees.pop("y")
    vectors = {name.removeprefix("vectors."): tree for name, tree in trees.items()}
    return State(file["round"], x, y, vectors, file["scalars"])


@pytest.mark.parametrize("pause", [0, 1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_goes_on_from_a_saved_state_as_if_it_had_not_stopped(name, pause):
    """On new clients: nothing lasts between rounds but the state."""
    whole = Session(make(name), problems_of(name)).play(4)
    before = Session(make(name), problems_of(name))
    after = Session(make(name), problems_of(name))
    after.state = loaded(saved(before.play(pause)))
    assert_same(after.play(4 - pause), whole)


@pytest.mark.parametrize("name", NAMES)
def test_what_moves_is_what_is_on_record_as_trained(name):
    session = Session(make(name), problems_of(name))
    before = session.state
    after = session.play(2)
    session.ledger.end()
    for level in ("x", "y"):
        moved = False
        for key, value in getattr(after, level).items():
            changed = value != getattr(before, level)[key]
            trained = session.ledger.trained[level].get(key, torch.zeros(()).bool())
            assert bool((trained | ~changed).all()), (level, key)
            moved |= bool(changed.any())
        assert moved == bool(session.ledger.trained[level]), level


@pytest.mark.parametrize("name", NAMES)
def test_what_it_carries_is_shaped_like_x_or_y(name):
    state = Session(make(name), problems_of(name)).play(2)
    shapes = [{k: v.shape for k, v in tree.items()} for tree in (state.x, state.y)]
    for vector, tree in state.vectors.items():
        assert {k: v.shape for k, v in tree.items()} in shapes, vector


class Listed(InProcess):
    """Remembers the works that rounds send."""

    def __init__(self, problems):
        super().__init__(problems)
        self.works = {}

    def map(self, work, requests):
        self.works[work.name] = work
        return super().map(work, requests)


@pytest.mark.parametrize("name", NAMES)
def test_rounds_send_only_works_that_the_algorithm_lists(name):
    problems = problems_of(name)
    runtime = Listed(problems)
    session = Session(make(name), problems, runtime)
    session.play(2)
    assert runtime.works
    for key, work in runtime.works.items():
        assert session.algorithm.works[key] is work
        assert make(name).works[key] == work


def travelling(arrays, levels, cut):
    """The bytes of what is held: of single entries, those of the mask."""
    total = 0
    for name, tree in arrays.items():
        part = cut.of(levels[name])
        for key, value in tree.items():
            number = int(part.mask[key].sum()) if isinstance(part, ElementMask) else value.numel()
            total += number * value.element_size()
    return total


class Watched(InProcess):
    """Remembers the sizes and names of all that travels."""

    def __init__(self, problems):
        super().__init__(problems)
        self.exchanges, self.down, self.up, self.names, self.wrong = 0, 0, 0, set(), set()

    def map(self, work, requests):
        if work.name == CALIBRATION:
            yield from super().map(work, requests)
            return
        self.exchanges += 1
        cuts = {}

        def sent():
            for request in requests:
                cut = cuts[request.client] = request.submodel
                self.down += travelling(request.arrays, work.takes, cut)
                if "x" in request.arrays:
                    self.down += cut.x.index_bytes() + cut.y.index_bytes()
                self._look(request.arrays, work.takes, cut)
                yield request

        for reply in super().map(work, sent()):
            cut = cuts[reply.client]
            self.up += travelling(reply.arrays, work.answers, cut)
            self._look(reply.arrays, work.answers, cut)
            yield reply

    def _look(self, arrays, levels, cut):
        self.names |= set(arrays)
        for name, tree in arrays.items():
            size = next(iter(tree.values())).element_size()
            if travelling({name: tree}, levels, cut) // size != cut.of(levels[name]).num_entries():
                self.wrong.add(name)


@pytest.mark.parametrize("name", NAMES)
def test_costs_are_those_of_what_it_says_it_exchanges(name):
    problems = problems_of(name)
    runtime = Watched(problems)
    session = Session(make(name), problems, runtime)
    spent = []
    for round in range(3):
        runtime.exchanges = runtime.down = runtime.up = 0
        session.play(1)
        spent = [e for e in session.ledger.entries if e.phase != CALIBRATION]
        if name in EXCHANGES:
            assert runtime.exchanges in EXCHANGES[name](round)
        else:
            assert runtime.exchanges == int(session.algorithm.exchanges.split()[0])
        assert sum(e.cost.bytes_down for e in spent) == runtime.down
        assert sum(e.cost.bytes_up for e in spent) == runtime.up
        assert sum(e.cost.multiply_adds for e in spent) > 0
    assert runtime.names == set(session.algorithm.vectors.split(", "))
    assert not runtime.wrong


@pytest.mark.parametrize("name", NAMES)
def test_clients_of_full_width_cost_what_the_full_model_costs_and_narrow_ones_less(name):
    problems = problems_of(name)
    for capacity in (1.0, 0.5):
        clients = [rabo.Client(problem, capacity) for problem in problems.values()]
        algorithm = make(name)
        shares = rabo.solve(clients, algorithm=algorithm, rounds=3).relative_cost
        if capacity == 1.0:
            assert list(shares.values()) == pytest.approx([1.0] * 3)
            continue
        if isinstance(
            algorithm.policy, (rabo.pruning.policies.Threshold, rabo.pruning.policies.Regions)
        ):
            assert shares.pop("multiply_adds") >= 1  # single entries save traffic, not work
        assert all(0 < share < 0.75 for share in shares.values())


@pytest.mark.parametrize("name", ALGORITHMS)  # separate clients are too few for a median
def test_it_leaves_the_choice_between_mean_and_median_to_the_run(name):
    states = []
    for kind in ("mean", "median"):
        session = Session(make(name), problems_of(name))
        session.cohort = replace(session.cohort, aggregate=rabo.Aggregate(kind))
        states.append(session.play(1))
    pairs = [(states[0].x, states[1].x), (states[0].y, states[1].y)]
    assert any(not torch.equal(v, b[k]) for a, b in pairs for k, v in a.items())
