"""The server goes on without clients that fail, lie in shape, or are silent."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rabo
from known_problems import federated_quadratics
from rabo.algorithms import AggITD, FedBiOAcc, FedMBO
from rabo.errors import ClientError
from rabo.exchange.cost import Cost
from rabo.execution import InProcess, Reply
from rabo.federation.federation import Federation
from rabo.federation.rounds import Round

HOSTILE = 1
MEASURED = {  # by the server
    "hypergradient_norm",
    "disagreement",
    "inner_disagreement",
    "limited_steps",
    "beta",
}
ALGORITHMS = {
    "rabo": rabo.RABO(num_inner_steps=2, policy=rabo.Static()),
    "rabo, global": rabo.RABO(num_inner_steps=1, hessian="global"),
    "single entries": rabo.RABO(num_inner_steps=1, policy=rabo.Magnitude()),
    "fedmbo": FedMBO(num_inner_steps=1, num_terms=3),
    "fedbioacc": FedBiOAcc(alpha=0.05, num_local_steps=1),
    "aggitd": AggITD(num_inner_steps=2, num_local_steps=1),
}


class Changed(InProcess):
    """Puts something else in place of what one client answers; None is silence."""

    def __init__(self, problems, change):
        super().__init__(problems)
        self.change = change

    def map(self, work, requests):
        for reply in super().map(work, requests):
            if reply.client != HOSTILE:
                yield reply
            elif (changed := self.change(reply)) is not None:
                yield changed


def federation(name, change, **tolerance):
    problems = federated_quadratics(4)
    clients = [rabo.Client(p, c) for p, c in zip(problems, [1.0, 0.5, 0.5, 1.0], strict=True)]
    tolerance = rabo.Tolerance(**{"on_fault": "drop", "max_norm": 1e6} | tolerance)
    runtime = Changed(dict(enumerate(problems)), change)
    return Federation(clients, ALGORITHMS[name], runtime=runtime, tolerance=tolerance)


@pytest.fixture(scope="module")
def without_client():
    """The state after two rounds in which one client is silent."""
    found = {}
    for name in ALGORITHMS:
        alone = federation(name, lambda reply: None)
        for done in alone.run(2):
            assert {(f.client, f.why) for f in done.faults} == {(HOSTILE, "it did not answer")}
        found[name] = alone.state
    return found


def replaced(tree, new):
    """One tensor of a reply is something else."""
    first = next(iter(tree))
    return {**tree, first: new(tree[first])}


def poisoned(value):
    return lambda tensor: tensor.index_fill(0, torch.tensor([0]), value)


TENSORS = [
    poisoned(float("nan")),
    poisoned(float("inf")),
    poisoned(-float("inf")),
    poisoned(1e7),  # beyond max_norm
    poisoned(1e200),  # its square is infinite
    lambda t: t.float(),
    lambda t: t.to(torch.complex128),
    lambda t: t.long(),
    lambda t: t[:-1],
    lambda t: t[:0],
    lambda t: t.sum(),
    lambda t: t.unsqueeze(0),
    lambda t: torch.cat([t, t]),
    lambda t: t.to_sparse(),
    lambda t: t.to("meta"),
    lambda t: t.numpy(),
    lambda t: t.tolist(),
    lambda t: None,
    lambda t: "a tensor",
]
ARRAYS = [
    lambda a: {},
    lambda a: None,
    lambda a: list(a),
    lambda a: {**a, "x_more": next(iter(a.values()))},
    lambda a: {f"{name}'": tree for name, tree in a.items()},
    lambda a: {**a, 3: None},
    lambda a: dict.fromkeys(a),
    lambda a: {name: {} for name in a},
    lambda a: {name: {**tree, "more": torch.zeros(1)} for name, tree in a.items()},
    lambda a: {name: list(tree.values()) for name, tree in a.items()},
]
NUMBERS = [float("nan"), float("inf"), 10**400, None, "1", [1.0], torch.tensor(1.0), {}, 1j]
REPLIES = [
    lambda r: replace(r, scalars=None),
    lambda r: replace(r, scalars={**r.scalars, "accuracy": 1.0}),
    lambda r: replace(r, scalars={**r.scalars, "a": 1.0, 5: 2.0}),
    lambda r: replace(r, cost=None),
    lambda r: replace(r, cost=(1, 2)),
    lambda r: replace(r, cost=Cost(multiply_adds=-1)),
    lambda r: replace(r, cost=Cost(seconds=float("nan"))),
    lambda r: replace(r, cost=Cost(peak_memory_bytes="1")),
    lambda r: replace(r, fault=ClientError(0, 0, "anything", ValueError("a lie"))),
    lambda r: Reply(r.client, {}),
]


@st.composite
def hostile_changes(draw):
    """A way to spoil any reply."""
    spoil = draw(st.sampled_from(REPLIES))
    kind = draw(st.sampled_from(["tensor", "arrays", "number", "reply"]))
    number, tensor = draw(st.sampled_from(NUMBERS)), draw(st.sampled_from(TENSORS))
    arrays, which = draw(st.sampled_from(ARRAYS)), draw(st.integers(0, 5))

    def change(reply):
        if kind == "tensor" and reply.arrays:
            name = sorted(reply.arrays)[which % len(reply.arrays)]
            return replace(
                reply, arrays={**reply.arrays, name: replaced(reply.arrays[name], tensor)}
            )
        if kind == "arrays" and reply.arrays:
            return replace(reply, arrays=arrays(reply.arrays))
        if kind == "number" and reply.scalars:
            name = sorted(reply.scalars)[which % len(reply.scalars)]
            return replace(reply, scalars={**reply.scalars, name: number})
        spoilt = spoil(reply)
        # what is empty already is spoilt by a name too many
        return spoilt if spoilt != reply else replace(reply, scalars={"x": 1.0})

    return change


@pytest.mark.parametrize("name", ALGORITHMS)
@given(change=hostile_changes())
def test_no_hostile_reply_changes_the_model_or_stops_the_server(name, change, without_client):
    """150 ways: the state is bit for bit that of a run in which the client is silent."""
    attacked = federation(name, change)
    for done in attacked.run(2):
        assert {fault.client for fault in done.faults} == {HOSTILE}
        assert all(fault.why for fault in done.faults)
        line = json.loads(json.dumps(done.as_dict()))
        assert Round.from_dict(line).as_dict() == done.as_dict()
        told = {"residual", "largest_curvature", "smallest_curvature", "backtracks"}
        assert set(line["metrics"]) <= told | MEASURED
    state, wanted = attacked.state, without_client[name]
    assert state.scalars == wanted.scalars
    trees, others = ({"x": s.x, "y": s.y, **s.vectors} for s in (state, wanted))
    for tree_name, tree in others.items():
        for key, value in tree.items():
            assert torch.equal(trees[tree_name][key], value), (tree_name, key)


def test_the_reason_says_what_was_expected_and_what_came():
    whys = {}
    for what, change in {
        "shape": lambda r: replace(
            r, arrays={n: replaced(t, TENSORS[8]) for n, t in r.arrays.items()}
        ),
        "norm": lambda r: replace(
            r, arrays={n: replaced(t, TENSORS[3]) for n, t in r.arrays.items()}
        ),
        "names": lambda r: replace(r, arrays={**r.arrays, "z": {}}),
    }.items():
        [done] = federation("rabo", change, on_fault="drop").run(1)
        whys[what] = {fault.phase: fault.why for fault in done.faults}
    assert whys["shape"]["update_inner"] == (
        "y.y must be torch.float64 of shape (2,), got torch.float64 of (1,)"
    )
    assert "must be finite and at most 1e+06, got 1e+07" in whys["norm"]["update_inner"]
    assert whys["names"]["update_inner"] == "its arrays must be y, got y, z"
    assert whys["names"]["measure_curvature"] == "its arrays must be none, got z"


def test_by_default_a_bad_reply_ends_the_run_with_client_round_and_reason():
    wrong = federation("rabo", lambda r: replace(r, scalars={}), on_fault="raise")
    with pytest.raises(ClientError, match="client 1 failed in round 1 at measure_curvature: Reply"):
        list(wrong.run(1))


def test_an_answer_that_nobody_asked_for_is_not_used():
    class Twice(InProcess):
        def map(self, work, requests):
            for reply in super().map(work, requests):
                yield reply
                yield reply
                yield replace(reply, client=9)

    problems = federated_quadratics()
    clients = [rabo.Client(problem) for problem in problems]
    plain = Federation(clients, ALGORITHMS["rabo"])
    tolerance = rabo.Tolerance(on_fault="drop")
    runtime = Twice(dict(enumerate(problems)))
    loud = Federation(clients, ALGORITHMS["rabo"], runtime=runtime, tolerance=tolerance)
    list(plain.run(2))
    assert {f.why for done in loud.run(2) for f in done.faults} == {"it was not asked"}
    assert torch.equal(plain.state.x["x"], loud.state.x["x"])


class Broken:
    """A problem whose inner loss fails at will."""

    def __init__(self, problem, fails):
        self._problem, self._fails = problem, fails

    def __getattr__(self, name):
        return getattr(self._problem, name)

    def restrict(self, cut):
        return Broken(self._problem.restrict(cut), self._fails)

    def inner(self, z, y, part):
        if self._fails():
            raise OSError("the disk is gone")
        return self._problem.inner(z, y, part)


@pytest.mark.parametrize("kind", ["plain", "recorded"])
def test_a_client_that_raises_is_left_out_or_ends_the_run_as_asked(kind):
    problems = federated_quadratics()
    failing = [False]
    problems[2] = Broken(problems[2], lambda: failing[0])
    clients = [rabo.Client(problem) for problem in problems]

    def run_with(on_fault):
        runtime = rabo.execution.RUNTIMES[kind](dict(enumerate(problems)))
        tolerance = rabo.Tolerance(on_fault=on_fault)
        own = Federation(clients, ALGORITHMS["rabo"], runtime=runtime, tolerance=tolerance)
        failing[0] = False
        list(own.run(3))
        failing[0] = True
        return next(own.run(1))

    done = run_with("drop")
    assert [(f.round, f.client, f.phase, f.why) for f in done.faults] == [
        (3, 2, "update_inner", "OSError: the disk is gone")
    ]
    assert done.coverage["y"].minimum == 2
    with pytest.raises(ClientError, match="client 2 failed in round 4 at update_inner") as caught:
        run_with("raise")
    assert isinstance(caught.value.__cause__, OSError)  # with its traceback


def test_a_client_that_always_fails_does_not_stop_the_others_nor_their_accounts():
    """Not even where costs are tried out: at its budget, and at full width."""
    problems = federated_quadratics()
    broken = [Broken(problems[1], lambda: True), Broken(problems[2], lambda: True)]
    capacities = [0.5, rabo.Budget(traffic=10**6), 0.5]
    alone = Federation([rabo.Client(problems[0], 0.5)], ALGORITHMS["rabo"])
    beside = Federation(
        [rabo.Client(p, c) for p, c in zip([problems[0], *broken], capacities, strict=True)],
        ALGORITHMS["rabo"],
        tolerance=rabo.Tolerance(on_fault="drop"),
    )
    list(alone.run(2))
    for done in beside.run(2):
        assert "the disk is gone" in done.absent[1]
        assert {fault.client for fault in done.faults} == {2}
    assert torch.equal(alone.state.x["x"], beside.state.x["x"])
    assert alone.full_cost._replace(seconds=0) == beside.full_cost._replace(seconds=0)


def test_a_round_with_too_few_replies_is_given_up_and_says_so():
    silent = federation("rabo", lambda reply: None, min_replies=4)
    start = silent.state
    first, second = silent.run(2)
    assert first.skipped == "3 of 4 clients answered measure_curvature, 4 must"
    assert (silent.state.x, silent.state.y) == (start.x, start.y)
    assert silent.state.round == 2
    assert second.coverage["x"].num_trained == second.coverage["y"].num_trained == 0
    assert second.cost.bytes_up == 0
    assert second.cost.bytes_down > 0  # was spent all the same
    enough = federation("rabo", lambda reply: None, min_replies=3)
    assert [done.skipped for done in enough.run(2)] == ["", ""]
    assert not torch.equal(enough.state.x["x"], start.x["x"])


def test_a_round_that_fails_half_way_leaves_no_trace_in_the_model():
    """y has been averaged when x cannot be: both stay."""
    lost = federation("rabo", lambda reply: None if "x" in reply.arrays else reply, min_replies=4)
    start = lost.state
    [done] = lost.run(1)
    assert done.skipped == "3 of 4 clients answered estimate_outer, 4 must"
    assert (lost.state.x, lost.state.y) == (start.x, start.y)
    assert done.coverage["y"].num_trained == 0


def test_too_few_clients_at_the_roll_call_are_said_too():
    clients = [rabo.Client(problem) for problem in federated_quadratics()]
    own = Federation(
        clients, ALGORITHMS["rabo"], participation=0.5, tolerance=rabo.Tolerance(min_replies=3)
    )
    assert [done.skipped for done in own.run(1)] == ["2 clients take part, 3 must"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_fault": "ignore"}, "on_fault must be raise or drop"),
        ({"min_replies": 0}, "min_replies must be at least 1"),
        ({"max_norm": float("nan")}, "max_norm must be positive"),
    ],
)
def test_impossible_choices_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        rabo.Tolerance(**options)
