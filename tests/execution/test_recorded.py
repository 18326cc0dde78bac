"""Recorded work gives what plain work gives, bit for bit on a CPU."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import rabo
from rabo.algorithms import ALGORITHMS, RABO, RAFBO, FedAvg, FedMBO
from rabo.algorithms.dist_maml import DistMAML
from rabo.errors import ClientError
from rabo.exchange.request import Answer
from rabo.execution import Grouped, InProcess, Recorded, players, room
from rabo.execution.players import as_block, copy_tree, outside
from rabo.federation.federation import Federation
from rabo.hypergradients import ConjugateGradient, CoordinateDifference, Neumann
from rabo.runs.experiment import Experiment
from rabo.tasks import TASKS
from rabo.tasks.image_batches import ImageBatches
from rabo.tree import leaves, map_leaves, shapes

ROUNDS = 5


def few_shot(queries=3, **options):
    task = TASKS["few-shot"](
        backbone="conv4", channels="8", tasks=2, queries=queries, test_tasks=2, **options
    )
    return task.build([1.0, 0.5, 0.25, 0.5], ROUNDS, 0, "cpu").clients


def loss_tuning():
    return (
        TASKS["loss-tuning"](dataset="digits", width=4).build([0.5] * 3, ROUNDS, 0, "cpu").clients
    )


def run(kind, clients, algorithm):
    problems = {i: c.problem for i, c in enumerate(clients)}
    runtime = kind(problems)
    federation = Federation(clients, algorithm, runtime=runtime)
    history = list(federation.run(ROUNDS))
    return federation, history, runtime


CASES = {
    "few-shot per task": (few_shot, RABO(num_inner_steps=4, momentum=0.8, calibrate_every=2)),
    "few-shot shared": (lambda: few_shot(heads="shared"), RAFBO(num_inner_steps=4)),
    "loss tuning": (
        loss_tuning,
        RABO(
            num_inner_steps=3,
            beta=lambda q: 0.1 / (q + 1),
            warm_up=1,
            hypergradient=Neumann(num_terms=2, step_size=0.1, products="recomputed"),
        ),
    ),
    "outer steps on the client": (
        loss_tuning,
        RAFBO(alpha=lambda q: 0.1 / (q + 1), beta=0.1, num_inner_steps=3, num_outer_steps=3),
    ),
    "fedmbo": (few_shot, FedMBO(num_inner_steps=3, num_terms=3)),
    "single level": (
        few_shot,
        FedAvg(levels="both", beta=1.0, beta_x=0.1, momentum=0.9, num_inner_steps=3),
    ),
    "hessian global": (lambda: few_shot(heads="shared"), RABO(num_inner_steps=2, hessian="global")),
}


@pytest.mark.parametrize("case", CASES)
def test_recorded_work_gives_the_same_bits_as_plain_work(case):
    make, algorithm = CASES[case]
    plain, plain_history, _ = run(InProcess, make(), algorithm)
    fast, fast_history, runtime = run(Recorded, make(), algorithm)
    for level in ("x", "y"):
        for name, value in getattr(plain.state, level).items():
            assert torch.equal(value, getattr(fast.state, level)[name]), (level, name)
    for a, b in zip(plain_history, fast_history, strict=True):
        assert dict(a.metrics) == dict(b.metrics)
        assert a.cost._replace(seconds=0, peak_memory_bytes=0) == b.cost._replace(
            seconds=0, peak_memory_bytes=0
        )
        assert a.coverage == b.coverage
    recorded = [r for local in runtime._kept.values() for r in local.recordings.values() if r]
    assert recorded, "nothing was recorded"


def test_work_that_draws_its_own_numbers_is_not_recorded():
    algorithm = RABO(
        num_inner_steps=1, hypergradient=CoordinateDifference(num_coordinates=3, num_iterations=1)
    )
    plain, _, _ = run(InProcess, few_shot(heads="shared"), algorithm)
    fast, _, runtime = run(Recorded, few_shot(heads="shared"), algorithm)
    assert all(torch.equal(v, fast.state.x[k]) for k, v in plain.state.x.items())
    works = {
        key[0][0].name: found is not None
        for local in runtime._kept.values()
        for key, found in local.recordings.items()
    }
    assert works["update_inner"]
    assert not works["estimate_outer"]  # it draws coordinates


def sampled(sample):
    """Clients whose batches are what `sample` draws, of a small network."""
    g = torch.Generator().manual_seed(0)
    data = (torch.randn(40, 6, generator=g), torch.randn(40, 1, generator=g))
    torch.manual_seed(0)
    problem = rabo.Problem(
        inner=lambda x, y, d: (y(x(d[0])) - d[1]).square().mean() + y["weight"].square().sum(),
        outer=lambda x, y, d: (y(x(d[0])) - d[1]).square().mean(),
        x=torch.nn.Linear(6, 4),
        y=torch.nn.Linear(4, 1),
        example=data[0][:3],
        sample=sample,
    )
    return [rabo.Client(problem.on(inner=data, outer=data), c) for c in (1.0, 0.5)]


def views(data, generator):
    start = int(torch.randint(30, (), generator=generator))
    part = tuple(t[start : start + 8] for t in data.inner)
    return rabo.Batch(part, part)


def half_views(data, generator):
    start = int(torch.randint(30, (), generator=generator))
    part = (data.inner[0][start : start + 8], data.inner[1][start : start + 8].clone())
    return rabo.Batch(part, part)


def of_any_size(data, generator):
    start, number = torch.randint(1, 20, (2,), generator=generator).tolist()
    part = tuple(t[start : start + number] for t in data.inner)
    return rabo.Batch(part, part)


@pytest.mark.parametrize("sample", [views, half_views, of_any_size])
def test_batches_that_are_views_or_change_their_size_are_followed(sample):
    algorithm = RABO(num_inner_steps=2, beta=0.05)
    clients = sampled(sample)
    before = [t.clone() for t in clients[0].problem.data.inner]
    plain, _, _ = run(InProcess, clients, algorithm)
    fast, _, _ = run(Recorded, clients, algorithm)
    for name, value in plain.state.x.items():  # views lie elsewhere in memory: other rounding
        torch.testing.assert_close(fast.state.x[name], value, rtol=1e-5, atol=1e-6)
    assert all(map(torch.equal, before, clients[0].problem.data.inner)), "data were written to"


@pytest.mark.parametrize("augment", [False, True])
def test_batches_of_all_steps_at_once_are_those_of_each_step(augment):
    g = torch.Generator().manual_seed(0)
    images = torch.randint(256, (30, 3, 8, 8), generator=g, dtype=torch.uint8)
    data = (images, torch.randint(3, (30,), generator=g))
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 3))
    problem = rabo.Problem(
        inner=lambda x, y, d: F.cross_entropy(y(d[0]) + x["l"], d[1]),
        outer=lambda x, y, d: F.cross_entropy(y(d[0]), d[1]),
        x={"l": torch.zeros(3)},
        y=net,
        prune="none",
        sample=ImageBatches(6, 5, augment),
    )
    clients = [rabo.Client(problem.on(inner=data, outer=data)) for _ in range(2)]
    algorithm = RABO(num_inner_steps=3, beta=0.05)
    plain, _, _ = run(InProcess, clients, algorithm)
    fast, _, runtime = run(Recorded, clients, algorithm)
    assert any(found for local in runtime._kept.values() for found in local.recordings.values())
    for level in ("x", "y"):
        found, truth = getattr(fast.state, level), getattr(plain.state, level)
        assert all(torch.equal(found[name], truth[name]) for name in truth)


def test_a_recording_that_turns_to_nan_names_the_client():
    clients = few_shot(heads="shared")
    federation, _, _ = run(Recorded, clients, RABO(num_inner_steps=2, beta=0.1))
    broken = {k: v * float("nan") for k, v in federation.state.y.items()}
    federation.state = rabo.State(federation.state.round, federation.state.x, broken)
    with pytest.raises(ClientError, match="client 0"):
        list(federation.run(1))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_gives_the_same_bits_and_costs_recorded(name):
    kind = ALGORITHMS[name]
    options = {"heads": "shared"} if kind.needs_one_y else {}
    task = {"backbone": "conv4", "channels": "4", "tasks": 2, "queries": 2, "test_tasks": 2}
    found = []
    for runtime in ("plain", "recorded"):
        experiment = Experiment(
            task="few-shot",
            task_options={**task, **options},
            algorithm=name,
            clients=2,
            capacities="1,1/2",
            rounds=4,
            runtime=runtime,
        )
        federation, _ = experiment.federation()
        federation.evaluate = None
        history = list(federation.run(4))
        costs = [r.cost._replace(seconds=0.0, peak_memory_bytes=0) for r in history]
        found.append((federation.state, costs))
    (plain, plain_costs), (fast, fast_costs) = found
    for level in ("x", "y"):
        for key, value in getattr(plain, level).items():
            assert torch.equal(value, getattr(fast, level)[key]), (level, key)
    assert plain_costs == fast_costs


def moved(federation):
    start, end = federation._start.x, federation.state.x
    return torch.cat([(end[k] - start[k]).flatten().double() for k in end])


@pytest.mark.parametrize(
    ("algorithm", "tolerance"),
    [
        (RABO(num_inner_steps=4, momentum=0.8, calibrate_every=2), 1e-4),
        (RABO(num_inner_steps=2, beta=0.1, warm_up=3), 1e-4),  # some work begins in groups
        (RAFBO(num_inner_steps=4), 3e-3),  # differences, whose step is that of the group
        (FedMBO(num_inner_steps=3, num_terms=3), 1e-4),
        (DistMAML(num_inner_steps=1, adapt_steps=2, adapt_rate=0.1), 1e-4),
    ],
    ids=["rabo", "late", "rafbo", "fedmbo", "dist-maml"],
)
def test_equal_clients_as_one_reach_what_they_reach_alone(algorithm, tolerance):
    # with this penalty systems are well conditioned, and rounding is not amplified
    plain, plain_history, _ = run(InProcess, few_shot(penalty=0.3), algorithm)
    fast, fast_history, runtime = run(Grouped, few_shot(penalty=0.3), algorithm)
    assert {len(clients) for clients, _ in runtime._kept} > {1}, "nobody worked together"
    assert (moved(plain) - moved(fast)).norm() <= tolerance * moved(plain).norm()
    for name, value in plain.state.y.items():
        torch.testing.assert_close(fast.state.y[name], value, rtol=tolerance, atol=tolerance)
    for a, b in zip(plain_history, fast_history, strict=True):
        assert a.cost.multiply_adds == b.cost.multiply_adds
        assert (a.cost.bytes_up, a.cost.bytes_down) == (b.cost.bytes_up, b.cost.bytes_down)
        covered = [{k: c._replace(mask_noise=0) for k, c in r.coverage.items()} for r in (a, b)]
        assert covered[0] == covered[1]
        if isinstance(algorithm, DistMAML):  # the mean over clients, not the sum of a group
            losses = [done.metrics["training_loss"] for done in (a, b)]
            assert losses[1] == pytest.approx(losses[0], rel=tolerance)


@pytest.mark.parametrize(("fitting", "groups"), [(1, {1}), (2, {1, 2}), (3, {3})])
def test_clients_work_as_one_as_far_as_memory_reaches(fitting, groups, monkeypatch):
    def clients():
        return [rabo.Client(c.problem, 0.5) for c in few_shot(penalty=0.3)[:3]]

    algorithm = RABO(num_inner_steps=2, momentum=0.8)
    plain, _, alone = run(Recorded, clients(), algorithm)
    needed = max(cost.peak_memory_bytes for cost in alone._alone.values())
    monkeypatch.setattr(room, "limit", lambda device: fitting * needed)
    fast, _, runtime = run(Grouped, clients(), algorithm)
    assert {len(clients) for clients, _ in runtime._kept} == groups
    assert (moved(plain) - moved(fast)).norm() <= 1e-4 * moved(plain).norm()


def test_groups_become_smaller_when_work_that_begins_later_needs_more(monkeypatch):
    def clients():
        return [rabo.Client(c.problem, 0.5) for c in few_shot(queries=15, penalty=0.3)[:3]]

    algorithm = RABO(num_inner_steps=2, beta=0.1, warm_up=3)
    plain, _, together = run(Grouped, clients(), algorithm)
    costs = {kind[0][0].name: cost.peak_memory_bytes for kind, cost in together._alone.items()}
    fitting = 2.9 * costs["estimate_outer"]
    assert 3 * costs["update_inner"] <= fitting
    monkeypatch.setattr(room, "limit", lambda device: fitting)
    fast, _, runtime = run(Grouped, clients(), algorithm)
    assert min(runtime._before.values()) >= 3  # all of them, at first
    assert {len(clients) for clients, _ in runtime._kept} == {1, 2}
    assert (moved(plain) - moved(fast)).norm() <= 1e-4 * moved(plain).norm()


def test_recordings_share_memory_where_there_is_no_room_for_their_own(monkeypatch):
    monkeypatch.setattr(room, "limit", lambda device: 100.0)
    here, device = room.Room(), torch.device("cpu")
    assert here.pool(device, 60) is None
    here.take(None, 60)
    shared = here.pool(device, 41)
    assert shared is not None
    here.take(shared, 41)
    assert here.pool(device, 40) is None  # what is shared does not count
    here.take(None, 40)
    assert here.pool(device, 1) is shared


def test_only_recordings_that_are_made_take_room():
    _, _, runtime = run(Recorded, few_shot(heads="shared"), RABO(hessian="global"))
    made = [r for local in runtime._kept.values() for r in local.recordings.values()]
    assert None in made
    assert runtime._room._held == sum(r.cost.peak_memory_bytes for r in made if r)


@given(st.integers(1, 200), st.integers(1, 300))
def test_groups_are_as_few_as_fit_and_as_equal_as_can_be(number, most):
    size = room.evenly(number, most)
    assert size <= most
    assert -(-number // size) == -(-number // most)
    assert room.evenly(number, size) == size  # no smaller size needs as few


def test_processes_that_share_a_device_leave_a_third_of_it(monkeypatch):
    monkeypatch.setattr(room, "_parts", room.PARTS)
    for number in range(1, 40):
        room.share_device(number)
        assert room._parts >= room.PARTS
        assert number * 2 / room._parts <= 2 / 3  # a group and own pools in each


def test_results_are_copied_out_of_shared_memory_with_their_types_and_nesting():
    reply = Answer(
        {"x": as_block({"a": torch.ones(2, 3), "b": torch.zeros(4)})}, {"loss": torch.tensor(2.0)}
    )
    found = (reply, torch.arange(2.0), {"y": {"w": torch.ones(3)}, "n": None, "both": [reply[0]]})
    copied = outside(found)
    assert shapes(copied) == shapes(found)
    assert isinstance(copied[0], Answer)
    assert copied[2]["n"] is None
    for a, b in zip(leaves(copied), leaves(found), strict=True):
        assert torch.equal(a, b)
        assert a.data_ptr() != b.data_ptr()
    copy_tree(copied, map_leaves(lambda t: t + 1, found))
    assert torch.equal(copied[0].arrays["x"]["a"], torch.full((2, 3), 2.0))


def test_a_mask_of_single_entries_is_not_taken_for_the_whole_model_of_earlier_rounds():
    def clients():
        widths = [[1.0, 1.0, 1.0, 0.5, 0.5], 0.5]  # the first had everything before
        return [rabo.Client(c.problem, w) for c, w in zip(few_shot(), widths, strict=False)]

    fiarse = ALGORITHMS["fiarse"](levels="both", beta=0.1, num_inner_steps=2)
    plain, _, _ = run(InProcess, clients(), fiarse)
    fast, _, _ = run(Recorded, clients(), fiarse)
    for level in ("x", "y"):
        for name, value in getattr(plain.state, level).items():
            assert torch.equal(value, getattr(fast.state, level)[name]), (level, name)


@pytest.mark.parametrize(
    "algorithm",
    [
        ALGORITHMS["static"](levels="both", beta=0.1, num_inner_steps=2),
        DistMAML(num_inner_steps=2, adapt_steps=1, adapt_rate=0.1),
        RABO(num_inner_steps=3, num_outer_steps=2),
    ],
    ids=["static", "dist-maml", "rabo"],
)
def test_work_that_trains_x_on_the_client_is_done_alone(algorithm):
    plain, _, _ = run(InProcess, few_shot(), algorithm)
    fast, _, runtime = run(Grouped, few_shot(), algorithm)
    assert {len(clients) for clients, _ in runtime._kept} == {1}
    assert all(torch.equal(v, fast.state.x[k]) for k, v in plain.state.x.items())


@pytest.mark.parametrize(
    "option",
    [
        {"clip": 1.0},
        {"max_norm": 5.0},
        {"on_fault": "drop"},
        {"aggregate": "median"},
        {"participation": 0.5},
    ],
    ids=str,
)
def test_clients_are_not_one_where_single_answers_are_looked_at(option):
    with pytest.raises(ValueError, match="gives no single answers"):
        Experiment(task="few-shot", runtime="grouped", clients=2, **option).federation()


@pytest.mark.parametrize(
    "hypergradient",
    [Neumann(), ConjugateGradient(damping="auto"), ConjugateGradient(tolerance=0.1)],
    ids=["neumann", "damping", "tolerance"],
)
def test_clients_are_not_one_for_estimators_that_measure_over_all_copies(hypergradient):
    algorithm = RABO(num_inner_steps=2, beta=0.1, hypergradient=hypergradient)
    plain, _, _ = run(InProcess, few_shot(), algorithm)
    fast, _, _ = run(Grouped, few_shot(), algorithm)
    assert all(torch.equal(v, fast.state.x[k]) for k, v in plain.state.x.items())


def test_reads_are_refused_without_a_warning_of_torch(monkeypatch):
    modes = []

    def set_mode(mode):
        warnings.warn("Synchronization debug mode is a prototype feature and ...", stacklevel=2)
        modes.append(mode)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        players._refuse_reads()
    assert modes == ["error"]
