"""The Flower runtime on a grid in this process: the same bits, and rounds that go on."""

import pytest
import torch
from fakes import FakeGrid
from flwr.app import ConfigRecord, Error, Message, RecordDict

import rabo
from rabo.algorithms import ALGORITHMS, RABO, Cohort
from rabo.flower.messages import has_cut
from rabo.flower.runtime import FlowerRuntime
from rabo.flower.work import message_types, work_for
from rabo.ledger import Ledger
from rabo.runtimes import InProcess
from rabo.seeding import stream
from rabo.solve import Federation
from rabo.tasks import TASKS
from rabo.tasks.quadratic import random_quadratic

WIDTHS = {0: 1.0, 1: 0.5, 2: 0.3}
SMALL = {
    "num_inner_steps": 2,
    "num_local_steps": 2,
    "num_terms": 3,
    "alpha": 0.05,
    "policy": rabo.Random(),
}


def quadratics():
    family = random_quadratic(stream(0, "family"), 5, 4, condition=3.0)
    return {i: family.client(stream(0, i), sigma_f=0.1, sigma_g=0.1) for i in WIDTHS}


def few_shot(**options):
    task = TASKS["few-shot"](
        backbone="conv4", channels="8", tasks=2, queries=3, test_tasks=2, **options
    )
    return {i: c.problem for i, c in enumerate(task.build([1.0] * 3, 3, 0, "cpu").clients)}


def make(name, **options):
    kind = ALGORITHMS[name]
    known = kind.__dataclass_fields__
    return kind(**{key: value for key, value in {**SMALL, **options}.items() if key in known})


def play(algorithm, problems, runtime, rounds=3):
    if isinstance(runtime, FlowerRuntime):
        runtime.widths(0, list(problems))
    state, ledger = algorithm.init(problems[0]), Ledger(runtime)
    cohort = Cohort(problems[0].channels, WIDTHS)
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
    **{name: (quadratics, make(name)) for name in ALGORITHMS},
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
    assert [has_cut(content) for content in contents[1:]] == [True, True, False]
    sizes = [len(content.array_records["task"]["bytes"].data) for content in contents[1:]]
    spent = [e.cost.bytes_down for e in ledger.entries if e.client == 2]
    assert sizes[1:] == spent


class Broken(FakeGrid):
    """Client 1 fails in its way at every piece of training."""

    def __init__(self, problems, algorithm, failure):
        super().__init__(problems, algorithm, WIDTHS)
        self.failure = failure

    def answer(self, client, message):
        if client == 1 and message.metadata.message_type == "train.inner":
            return self.failure(message)
        return super().answer(client, message)


FAILURES = {
    "raises": (lambda m: Message(Error(2, "<ValueError: no>"), reply_to=m), "<ValueError: no>"),
    "crashes": (lambda m: Message(Error(8), reply_to=m), "its process crashed"),
    "is gone": (lambda m: Message(Error(5, "x"), reply_to=m), "its node is gone"),
    "is slow": (lambda m: None, "no answer within 0.2 s"),
    "answers nonsense": (
        lambda m: Message(RecordDict({"a": ConfigRecord({"b": 1})}), reply_to=m),
        "cannot be read",
    ),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_round_goes_on_without_a_client_that_fails_and_the_record_names_it(failure):
    problems, algorithm, faults = quadratics(), make("rabo"), []
    answer, why = FAILURES[failure]
    runtime = FlowerRuntime(
        Broken(problems, algorithm, answer),
        deadline=0.2,
        poll=0.01,
        on_fault=lambda *fault: faults.append(fault),
    )
    state, _ = play(algorithm, problems, runtime, rounds=1)
    assert [(c, q, phase) for c, q, phase, _ in faults] == [(1, 0, "update_inner")]
    assert why in faults[0][3]

    class Without(InProcess):
        def map(self, work, tasks):
            asked = ((c, t) for c, t in tasks if c != 1 or work.__name__ == "measure_curvature")
            return super().map(work, asked)

    expected, _ = play(algorithm, problems, Without(problems), rounds=1)
    assert_same(expected, state)


def test_a_node_that_was_late_is_not_waited_for_until_it_answers_a_roll_call():
    problems, algorithm, faults = quadratics(), make("rabo"), []
    grid = FakeGrid(problems, algorithm, WIDTHS)
    runtime = FlowerRuntime(grid, deadline=0.3, poll=0.01, on_fault=lambda *f: faults.append(f))
    assert runtime.widths(0, [0, 1, 2]) == WIDTHS
    alive, grid.answer = grid.answer, lambda c, m: None if c == 1 else alive(c, m)
    assert runtime.widths(1, [0, 1, 2]) == {0: 1.0, 2: 0.3}
    assert [(c, q) for c, q, *_ in faults] == [(1, 1)]
    for round in (2, 3):  # nobody waits for it, and it is asked once
        assert runtime.widths(round, [0, 1, 2]) == {0: 1.0, 2: 0.3}
    assert next(grid.ids) == 3 + 3 + 3 + 2
    assert len(faults) == 1
    grid.answer = alive
    grid.replies[str(3 + 3 + 1)] = alive(1, Message(RecordDict(), 101, "query.width"))
    assert runtime.widths(4, [0, 1, 2]) == WIDTHS
    assert runtime.widths(5, [0, 1, 2]) == WIDTHS


def test_two_nodes_with_the_same_data_are_one_client():
    problems, algorithm, faults = quadratics(), make("rabo"), []
    grid = FakeGrid(problems, algorithm, WIDTHS)
    alive = grid.answer
    grid.answer = lambda c, m: alive(min(c, 1), m)
    runtime = FlowerRuntime(grid, on_fault=lambda *f: faults.append(f))
    assert runtime.widths(0, [0, 1, 2]) == {0: 1.0, 1: 0.5}
    assert faults == [(1, 0, "query.width", "node 102 is a second client 1")]


def test_a_federation_takes_the_widths_its_clients_ask_for():
    problems, algorithm = few_shot(), make("rabo", policy=rabo.Importance())
    grid = FakeGrid(problems, algorithm, {0: 1.0, 1: rabo.resources.Absent("busy"), 2: 0.25})
    clients = [rabo.Client(problems[0])] * 3
    federation = Federation(clients, algorithm, runtime=FlowerRuntime(grid), compare=False)
    rounds = []
    for done in federation.run(3):
        rounds.append((dict(done.present), dict(done.absent)))
        grid.widths[1] = 0.5 if done.round == 0 else 0.125  # a changed budget
    assert rounds == [
        ({0: 1.0, 2: 0.25}, {1: "busy"}),
        ({0: 1.0, 1: 0.5, 2: 0.25}, {}),
        ({0: 1.0, 1: 0.125, 2: 0.25}, {}),
    ]


def test_a_client_does_only_what_is_in_its_table():
    algorithm = RABO()
    assert work_for("train.inner", algorithm) == algorithm.update_inner
    assert work_for("query.measure_curvature", algorithm).__name__ == "measure_curvature"
    for name in ("train.round", "train.init", "train.__init__", "query.lanczos", "query.point"):
        with pytest.raises(ValueError, match="unknown work"):
            work_for(name, algorithm)
    assert {"train.inner", "train.outer", "query.pull_back", "train.pull_back"} <= message_types()


def test_a_client_that_lost_its_submodel_says_so():
    problems, algorithm, faults = quadratics(), make("rabo"), []
    grid = FakeGrid(problems, algorithm, WIDTHS)
    alive = grid.answer

    def forgetful(client, message):
        if message.metadata.message_type == "train.outer":
            grid.kept[client] = RecordDict()
        return alive(client, message)

    grid.answer = forgetful
    runtime = FlowerRuntime(grid, on_fault=lambda *f: faults.append(f))
    state, _ = play(algorithm, problems, runtime, rounds=1)
    assert state.round == 1
    assert [why for *_, why in faults] == [
        f"client {c} does not hold the submodel of round 0" for c in WIDTHS
    ]
