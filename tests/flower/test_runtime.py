"""The Flower runtime on a grid in this process: the same bits, and rounds that go on."""

from dataclasses import dataclass, fields, replace

import pytest
import torch
import torch.nn.functional as F
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from grids import FakeGrid, travel
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import rabo
from known_problems import episodic_problem
from rabo.algorithms import ALGORITHMS, Cohort
from rabo.errors import ReplyError
from rabo.exchange.budgets import Absent
from rabo.exchange.request import Request
from rabo.exchange.work import Work, levels
from rabo.execution import InProcess, Private
from rabo.federation.federation import Federation
from rabo.federation.ledger import Ledger
from rabo.flower.messages import (
    CUT,
    DTYPES,
    INLINE,
    RAW,
    WORK,
    raw_of,
    request_records,
    unpack,
    work_name,
)
from rabo.flower.runtime import FlowerRuntime
from rabo.flower.worker import Worker
from rabo.pruning.submodel import cut
from rabo.seeding import stream
from rabo.tasks import TASKS
from rabo.tasks.quadratic import random_quadratic

WIDTHS = {0: 1.0, 1: 0.5, 2: 0.3}
SMALL = {"num_inner_steps": 2, "num_local_steps": 2, "num_terms": 3, "alpha": 0.05}
DROP = rabo.Tolerance(on_fault="drop")


def quadratics(clients=WIDTHS):
    family = random_quadratic(stream(0, "family"), 5, 4, condition=3.0)
    return {i: family.client(stream(0, i), sigma_f=0.1, sigma_g=0.1) for i in clients}


def episodes():
    return {i: episodic_problem(i) for i in WIDTHS}


def few_shot(**options):
    task = TASKS["few-shot"](
        backbone="conv4", channels="8", tasks=2, queries=3, test_tasks=2, **options
    )
    return {i: c.problem for i, c in enumerate(task.build([1.0] * 3, 3, 0, "cpu").clients)}


def labelled(split=True):
    """Clients with labels {0, 1}, {1, 2} and {2, 3}; a network as x and y, or as y alone."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5))
    x, y = (net[:2], net[2]) if split else ({}, net)
    problem = rabo.Problem(
        loss=lambda x, y, data: F.cross_entropy(y(x(data[0]) if split else data[0]), data[1]),
        x=x,
        y=y,
        example=torch.zeros(2, 3),
        labels=lambda data: data[1],
    )
    return {
        i: problem.on((torch.randn(8, 3, generator=stream(i)), torch.arange(8) % 2 + i))
        for i in WIDTHS
    }


def make(name, **options):
    kind = ALGORITHMS[name]
    policy = (getattr(kind, "own_policy", None) or rabo.Random)()
    known = {option.name for option in fields(kind)}
    options = {**SMALL, "policy": policy, **options}
    return kind(**{key: value for key, value in options.items() if key in known})


def whole_cut(problem):
    units = problem.channels.units
    return cut(problem.channels, {group: torch.arange(n) for group, n in units.items()})


def play(algorithm, problems, runtime, rounds=3, widths=WIDTHS):
    if isinstance(runtime, FlowerRuntime):
        runtime.widths(0, list(problems))
    state, ledger = algorithm.init(problems[0]), Ledger(runtime)
    cohort = Cohort(problems[0].channels, widths)
    ledger.begin(state.x, state.y)
    state = algorithm.prepare(state, cohort, ledger)
    for _ in range(rounds):
        ledger.begin(state.x, state.y)
        state = algorithm.round(state, cohort, ledger)
    return state, ledger


def assert_same(a, b):
    assert a.scalars == b.scalars
    trees = [{"x": s.x, "y": s.y, **s.vectors} for s in (a, b)]
    for name, tree in trees[0].items():
        for key, value in tree.items():
            assert torch.equal(value, trees[1][name][key]), (name, key)


CASES = {
    **{
        n: (episodes if kind.is_episodic else quadratics, make(n)) for n, kind in ALGORITHMS.items()
    },
    "labels": (labelled, make("static", mask_logits="zero", average_by_label=True)),
    "no x": (lambda: labelled(split=False), make("static", average_by_label=True)),
    "global Hessian": (quadratics, make("rabo", hessian="global")),
    "single entries": (quadratics, make("rabo", policy=rabo.Magnitude())),
    "copies of y": (few_shot, make("rabo", momentum=0.8)),
    "chains on copies": (few_shot, make("fedmbo", policy=rabo.Importance())),
    "modules, global Hessian": (lambda: few_shot(heads="shared"), make("rafbo", hessian="global")),
    "modules, single entries": (few_shot, make("rafbo", policy=rabo.Magnitude())),
}


@pytest.mark.parametrize("case", CASES)
def test_messages_to_new_processes_give_the_bits_of_clients_in_this_one(case):
    clients, algorithm = CASES[case]
    problems = clients()
    plain, accounts = play(algorithm, problems, InProcess(problems))
    grid = FakeGrid(problems, algorithm, WIDTHS)
    sent, other = play(algorithm, problems, FlowerRuntime(grid))
    assert_same(plain, sent)
    for level in ("bytes_up", "bytes_down"):
        assert getattr(accounts.total, level) == getattr(other.total, level)
    assert other.total.multiply_adds >= accounts.total.multiply_adds  # graphs are built anew


def test_the_cut_travels_once_a_round_and_only_kept_entries_do():
    problems, algorithm = quadratics(), make("rabo")
    grid = FakeGrid(problems, algorithm, WIDTHS)
    _, ledger = play(algorithm, problems, FlowerRuntime(grid), rounds=1)
    contents = [content for client, _, content in grid.seen if client == 2]
    cuts = [CUT + "kept" in unpack("request", travel(content)) for content in contents[1:]]
    assert cuts == [True, True, False]
    sizes = [len(raw_of("request", content)) for content in contents[1:]]
    spent = [e.cost.bytes_down for e in ledger.entries if e.client == 2]
    assert sizes[1:] == spent


@pytest.mark.parametrize(
    "policy", [rabo.Random(), rabo.Segments(), rabo.Regions(), rabo.ChannelRegions()]
)
def test_seventeen_clients_with_submodels_of_their_own_train_x_over_flower(policy):
    widths = dict.fromkeys(range(17), 0.5)
    problems, algorithm = quadratics(widths), make("rabo", policy=policy, beta=0.1)
    plain, accounts = play(algorithm, problems, InProcess(problems), 2, widths)
    grid = FakeGrid(problems, algorithm, widths)
    sent, other = play(algorithm, problems, FlowerRuntime(grid), 2, widths)
    assert_same(plain, sent)
    assert other.end()["x"].num_trained > 0
    assert other.total.bytes_down == accounts.total.bytes_down


def federation(problems, algorithm, runtime, **options):
    clients = [rabo.Client(problems[0])] * len(problems)
    options = {"tolerance": DROP, "compare": False, **options}
    return Federation(clients, algorithm, runtime=runtime, **options)


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_what_leaves_a_client_is_clipped_and_noised_already(noise):
    problems, algorithm = quadratics(), make("rafbo")
    privacy = rabo.Privacy(clip=0.01, noise_multiplier=noise)
    plain, _ = play(algorithm, problems, Private(InProcess(problems), privacy))
    grid = FakeGrid(problems, algorithm, WIDTHS, privacy)
    sent, _ = play(algorithm, problems, FlowerRuntime(grid))
    assert_same(plain, sent)
    norms = [float(norm) for norm in grid.norms]
    assert norms
    assert (max(norms) <= 0.01 * (1 + 1e-6)) == (noise == 0)


@pytest.mark.parametrize("name", ["rabo", "fedmbo", "static"])
def test_costs_relative_to_the_full_model_are_those_of_one_process(name):
    problems, algorithm = quadratics(), make(name)
    clients = [rabo.Client(problems[i], WIDTHS[i]) for i in problems]
    near = list(Federation(clients, algorithm).run(2))
    grid = FakeGrid(problems, algorithm, WIDTHS)
    far = list(federation(problems, algorithm, FlowerRuntime(grid)).run(2))
    assert 0 < far[-1].relative_cost["multiply_adds"] < 1
    assert [done.relative_cost for done in far] == [done.relative_cost for done in near]
    assert all(done.seconds > 0 for done in [*near, *far])


def test_a_run_that_began_without_the_full_models_cost_goes_on_without_it():
    problems, algorithm = quadratics(), make("rabo")
    silent = FakeGrid(problems, algorithm, WIDTHS, compare=False)
    begun = federation(problems, algorithm, FlowerRuntime(silent))
    [first] = begun.run(1)
    grid = FakeGrid(problems, algorithm, WIDTHS)
    resumed = federation(problems, algorithm, FlowerRuntime(grid))
    resumed.restore(begun.snapshot())
    [second] = resumed.run(1)
    assert first.relative_cost == second.relative_cost == {}


def asked_for(message):
    """The name of the work of a message, or its type."""
    kind = message.metadata.message_type
    return work_name(message.content) if kind == WORK else kind


class Scripted(FakeGrid):
    """One client answers one work, or the roll call, in its own way."""

    def __init__(self, problems, algorithm, failure, kind="update_inner", widths=WIDTHS):
        super().__init__(problems, algorithm, widths)
        self.failure, self.kind = failure, kind

    def answer(self, client, message):
        if client == 1 and asked_for(message) == self.kind:
            return self.failure(message)
        return super().answer(client, message)


@dataclass(frozen=True)
class Broken(Work):
    """Inner steps that fail."""

    error: Exception

    name = "update_inner"
    takes, answers = levels(x="x", y="y"), levels(y="y")

    def __call__(self, request, client):
        raise self.error


class Failing(InProcess):
    """One client fails at its inner steps, in this process."""

    def __init__(self, problems, error):
        super().__init__(problems)
        self.error = error

    def map(self, work, requests):
        for request in requests:
            fails = request.client == 1 and work.name == "update_inner"
            yield from super().map(Broken(self.error) if fails else work, [request])

    def widths(self, round, clients):
        return {client: WIDTHS[client] for client in clients}


def nonsense(message):
    return Message(RecordDict({"a": ConfigRecord({"b": 1})}), reply_to=message)


FAILURES = {
    "raises": (lambda m: Message(Error(2, "ValueError: no\n"), reply_to=m), "ValueError: no "),
    "crashes": (lambda m: Message(Error(8), reply_to=m), "its process crashed"),
    "is gone": (lambda m: Message(Error(5, "x"), reply_to=m), "its node is gone"),
    "is slow": (lambda m: None, "no answer within 0.2 s"),
    "answers nonsense": (nonsense, "its reply cannot be read: KeyError: 'reply.head'"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_round_goes_on_without_a_client_that_fails_and_the_record_names_it(failure):
    problems, algorithm = quadratics(), make("rabo")
    answer, why = FAILURES[failure]
    grid = Scripted(problems, algorithm, answer)
    far = federation(problems, algorithm, FlowerRuntime(grid, deadline=0.2, poll=0.01))
    near = federation(problems, algorithm, Failing(problems, rabo.errors.ReplyError(why)))
    [found], [expected] = list(far.run(1)), list(near.run(1))
    assert found.faults == expected.faults == ((0, 1, "update_inner", why),)
    assert found.coverage == expected.coverage
    assert_same(near.state, far.state)


def test_what_goes_wrong_on_a_client_is_recorded_in_the_words_of_this_process():
    class Wrong(rabo.RABO):
        @property
        def works(self):
            return {**super().works, "update_inner": Broken(ZeroDivisionError("division by zero"))}

    problems, algorithm = quadratics(), make("rabo")
    grid = FakeGrid(problems, algorithm, WIDTHS)
    grid.algorithms = {1: Wrong(**{f.name: getattr(algorithm, f.name) for f in fields(algorithm)})}
    far = federation(problems, algorithm, FlowerRuntime(grid))
    near = federation(problems, algorithm, Failing(problems, ZeroDivisionError("division by zero")))
    [found], [expected] = list(far.run(1)), list(near.run(1))
    assert found.faults[0].why == "ZeroDivisionError: division by zero"
    assert found.faults == expected.faults
    assert_same(near.state, far.state)


def test_a_round_that_too_few_answer_is_given_up_and_an_error_can_end_the_run():
    problems, algorithm = quadratics(), make("rabo")
    grid = Scripted(problems, algorithm, FAILURES["crashes"][0])
    tolerance = rabo.Tolerance(on_fault="drop", min_replies=3)
    far = federation(problems, algorithm, FlowerRuntime(grid), tolerance=tolerance)
    start = far.state
    [done] = far.run(1)
    assert done.skipped == "2 of 3 clients answered update_inner, 3 must"
    assert all(torch.equal(far.state.x[name], value) for name, value in start.x.items())
    strict = federation(problems, algorithm, FlowerRuntime(grid), tolerance=rabo.Tolerance())
    with pytest.raises(rabo.errors.ClientError, match=r"client 1 .* its process crashed"):
        list(strict.run(1))


def roll_call(round, runtime):
    found = runtime.widths(round, [0, 1, 2])
    return {c: w.why if isinstance(w, Absent) else w for c, w in found.items()}


def test_a_node_that_was_late_is_not_waited_for_until_it_answers_a_roll_call():
    problems, algorithm = quadratics(), make("rabo")
    grid = FakeGrid(problems, algorithm, WIDTHS)
    runtime = FlowerRuntime(grid, deadline=0.3, poll=0.01)
    assert roll_call(0, runtime) == WIDTHS
    alive, grid.answer = grid.answer, lambda c, m: None if c == 1 else alive(c, m)
    assert roll_call(1, runtime) == {**WIDTHS, 1: "no answer within 0.3 s"}
    for round in (2, 3):  # nobody waits for it, and it is asked once
        assert roll_call(round, runtime) == {**WIDTHS, 1: "no answer since round 2"}
    assert next(grid.ids) == 3 + 3 + 3 + 2
    grid.answer = alive
    grid.replies[str(3 + 3 + 1)] = alive(1, Message(RecordDict(), 101, "query.width"))
    assert roll_call(4, runtime) == WIDTHS
    assert roll_call(5, runtime) == WIDTHS


def test_a_node_that_is_gone_may_come_back_as_another():
    problems, algorithm = quadratics(), make("rabo")
    grid = FakeGrid(problems, algorithm, WIDTHS)
    runtime = FlowerRuntime(grid)
    assert roll_call(0, runtime) == WIDTHS
    grid.nodes = {100: 0, 101: 1}
    assert roll_call(1, runtime) == {**WIDTHS, 2: "its node is gone"}
    grid.nodes = {100: 0, 101: 1, 99: 2}
    assert roll_call(2, runtime) == WIDTHS
    assert runtime._nodes == {0: 100, 1: 101, 2: 99}


def test_who_has_been_a_client_stays_it_when_another_node_says_so_too():
    problems, algorithm = quadratics(), make("rabo")
    grid = FakeGrid(problems, algorithm, WIDTHS)
    runtime = FlowerRuntime(grid)
    assert roll_call(0, runtime) == WIDTHS
    grid.nodes = {100: 0, 101: 1, 7: 1}
    assert roll_call(1, runtime)[1] == 0.5
    assert runtime._nodes[1] == 101


def test_a_node_that_never_says_who_it_is_is_no_client():
    problems, algorithm = quadratics(), make("rabo")
    grid = Scripted(problems, algorithm, nonsense, kind="query.width")
    assert roll_call(0, FlowerRuntime(grid)) == {**WIDTHS, 1: "no node has joined for it"}


def test_a_roll_call_waits_for_those_who_must_be_there():
    problems, algorithm = quadratics(), make("rabo")
    grid = FakeGrid(problems, algorithm, WIDTHS)
    grid.nodes = {100: 0}
    assert roll_call(0, FlowerRuntime(grid, least=2, wait=0.01))[1] == "no node has joined for it"
    asked = grid.get_node_ids

    def joining():  # one more whenever somebody looks
        grid.nodes = {100 + i: i for i in range(min(3, len(grid.nodes) + 1))}
        return asked()

    grid.get_node_ids = joining
    assert roll_call(0, FlowerRuntime(grid, least=3, wait=60)) == WIDTHS


def test_a_federation_takes_the_widths_its_clients_ask_for_and_those_who_join_late():
    problems, algorithm = few_shot(), make("rabo", policy=rabo.Importance())
    grid = FakeGrid(problems, algorithm, {0: 1.0, 1: Absent("busy"), 2: 0.25})
    grid.nodes = {100: 0, 101: 1}
    far = federation(problems, algorithm, FlowerRuntime(grid))
    rounds = []
    for done in far.run(3):
        rounds.append((dict(done.present), dict(done.absent)))
        grid.nodes[102] = 2
        grid.widths[1] = 0.5 if done.round == 0 else 0.125  # a changed budget
    assert rounds == [
        ({0: 1.0}, {1: "busy", 2: "no node has joined for it"}),
        ({0: 1.0, 1: 0.5, 2: 0.25}, {}),
        ({0: 1.0, 1: 0.125, 2: 0.25}, {}),
    ]


@pytest.mark.parametrize("name", ["rabo", "fedmbo"])
def test_a_server_that_starts_anew_goes_on_to_the_same_bits(name):
    problems, algorithm = quadratics(), make(name)
    grid = FakeGrid(problems, algorithm, WIDTHS)
    whole, first, second = (federation(problems, algorithm, FlowerRuntime(grid)) for _ in range(3))
    list(whole.run(4))
    list(first.run(2))
    second.restore(first.snapshot())  # the nodes are those that the first one has known
    list(second.run(2))
    assert_same(whole.state, second.state)


@pytest.mark.parametrize("name", ["round", "__init__", "policy", "pull_back", "update_outer"])
def test_a_client_refuses_work_that_its_algorithm_does_not_list(name):
    problems, algorithm = quadratics(), make("rabo")
    worker, whole = Worker(0, problems[0], algorithm), whole_cut(problems[0])
    x, y = problems[0].start()
    request = Request(0, 0, 0, whole, {"x": x, "y": y}, {"beta": 0.1})
    records = request_records(request, algorithm.update_inner)
    assert "fault" not in worker.answer(travel(records), RecordDict())
    records["request.head"]["work"] = name
    with pytest.raises(ValueError, match="unknown work"):
        worker.answer(travel(records), RecordDict())


def test_a_client_refuses_an_array_that_its_work_does_not_take():
    problems, algorithm = quadratics(), make("rabo")
    worker, whole = Worker(0, problems[0], algorithm), whole_cut(problems[0])
    x, y = problems[0].start()
    request = Request(0, 0, 0, whole, {"x": x, "y": y}, {"beta": 0.1})
    records = request_records(request, algorithm.update_inner)
    records["request.head"]["work"] = "estimate_outer"
    with pytest.raises(ReplyError, match=r"arrays must be y, got \['x'\]"):
        worker.answer(travel(records), RecordDict())


def test_a_client_that_lost_its_submodel_says_so():
    problems, algorithm = quadratics(), make("rabo")
    grid = FakeGrid(problems, algorithm, WIDTHS)
    alive = grid.answer

    def forgetful(client, message):
        if asked_for(message) == "estimate_outer":
            grid.kept[client] = RecordDict()
        return alive(client, message)

    grid.answer = forgetful
    far = federation(problems, algorithm, FlowerRuntime(grid))
    [done] = far.run(1)
    assert [fault.why for fault in done.faults] == [
        f"ValueError: client {c} does not hold the submodel of round 1" for c in WIDTHS
    ]


WORDS = st.text(max_size=12)
LAYOUTS = st.lists(
    st.builds(
        "{} {} {}".format,
        st.sampled_from([*DTYPES, "object"]) | WORDS,
        st.lists(st.integers(-2, 2**40) | st.integers(0, 4), max_size=3).map(
            lambda shape: ",".join(map(str, shape))
        ),
        st.sampled_from(["", "x", "y", "0", "theta"]) | WORDS,
    )
    | WORDS,
    max_size=3,
)
NUMBERS = st.floats() | st.integers(-(2**63), 2**63 - 1)
HEADS = st.dictionaries(
    st.sampled_from(
        ["multiply_adds", "peak_memory_bytes", "seconds", "vector x", "vector y", INLINE]
    )
    | WORDS,
    LAYOUTS | NUMBERS | WORDS | st.binary(max_size=8),
    max_size=7,
)


def written(data, stype, head, fault):
    records = RecordDict(
        {
            "reply": ArrayRecord({"bytes": Array("uint8", (len(data),), stype, data)}),
            "reply.head": ConfigRecord(head),
        }
    )
    if fault is not None:
        records["fault"] = ConfigRecord({"why": fault})
    return records


FOREIGN = st.builds(
    written,
    st.binary(max_size=64),
    st.sampled_from([RAW, "numpy.ndarray", "pickle"]),
    HEADS,
    st.none() | WORDS | NUMBERS,
)
POISON = st.sampled_from([b"\xff" * 8, b"\x00\x00\x00\x00\x00\x00\xf0\x7f", b"\x7f" * 8])


@st.composite
def altered(draw):
    """A true reply of which one thing is wrong."""
    kind = draw(
        st.sampled_from(["poison", "shorter", "longer", "dtype", "shape", "name", "number"])
    )
    poison, what = draw(POISON), draw(WORDS)
    bad = draw(st.sampled_from([float("nan"), float("inf"), -1.0, "1", b"1"]))

    def change(content):
        data, head = raw_of("reply", content), dict(content.config_records["reply.head"])
        del head[INLINE]
        vector = next(name for name in head if name.startswith("vector "))
        dtype, shape, name = head[vector][0].split(" ", 2)
        if kind == "poison":
            data = poison + data[8:]
        elif kind in ("shorter", "longer"):
            data = data[:-1] if kind == "shorter" else data + b"\x00"
        elif kind == "number":
            head["seconds"] = bad
        else:
            dtype = "int64" if kind == "dtype" else dtype
            shape = f"{shape},1" if kind == "shape" else shape
            name = f"{name}{what}?" if kind == "name" else name
            head[vector] = [f"{dtype} {shape} {name}", *head[vector][1:]]
        return written(data, RAW, head, None)

    return change


@pytest.fixture(scope="module")
def honest():
    """What a round gives in which client 1 fails, and what clients say, asked once for each."""
    problems, algorithm = quadratics(), make("rabo")
    grid = Scripted(problems, algorithm, FAILURES["crashes"][0])
    far = federation(problems, algorithm, FlowerRuntime(grid))
    list(far.run(1))
    return problems, algorithm, far.state, {}


@settings(max_examples=4 * settings.default.max_examples)
@given(change=FOREIGN.map(lambda records: lambda _: records) | altered())
def test_a_hostile_reply_neither_ends_a_run_nor_changes_the_model(honest, change):
    problems, algorithm, expected, said = honest
    grid = FakeGrid(problems, algorithm, WIDTHS)
    alive = grid.answer

    def hostile(client, message):
        key = client, asked_for(message)
        if key not in said:
            said[key] = alive(client, message).content
        lies = key == (1, "update_inner")
        return Message(travel(change(said[key])) if lies else said[key], reply_to=message)

    grid.answer = hostile
    tolerance = replace(DROP, max_norm=1e6)
    far = federation(problems, algorithm, FlowerRuntime(grid), tolerance=tolerance)
    [done] = far.run(1)
    assert [(fault.client, fault.phase) for fault in done.faults] == [(1, "update_inner")]
    assert_same(expected, far.state)


ROLL_CALLS = st.dictionaries(
    st.sampled_from(["client", "width", "why"]) | WORDS,
    NUMBERS | WORDS | st.lists(st.integers(-5, 5), max_size=2) | st.just(1),
    max_size=4,
)


@settings(max_examples=4 * settings.default.max_examples)
@given(answer=ROLL_CALLS)
def test_a_hostile_answer_to_a_roll_call_takes_nobodys_place(answer):
    problems, algorithm = quadratics(), make("rabo")

    def lie(message):
        return Message(RecordDict({"width": ConfigRecord(answer)}), reply_to=message)

    grid = FakeGrid(problems, algorithm, WIDTHS)
    runtime = FlowerRuntime(grid)
    runtime.widths(0, [0, 1, 2])
    alive = grid.answer
    grid.answer = lambda c, m: lie(m) if c == 1 else alive(c, m)
    found = runtime.widths(1, [0, 1, 2])
    assert (found[0], found[2]) == (WIDTHS[0], WIDTHS[2])
    assert isinstance(found[1], Absent) or 0 < found[1] <= 1
