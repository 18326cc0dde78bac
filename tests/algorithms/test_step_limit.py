"""The longest step on x, against steps without a limit."""

from dataclasses import replace
from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rabo
from known_problems import federated_quadratics, one_round
from rabo.algorithms import ALGORITHMS, Adam, Descent
from rabo.algorithms.step_limit import limited
from rabo.federation.federation import Federation

F64 = {"dtype": torch.float64}
# the others inherit their step on x from one of these
NAMES = ["rabo", "fedmbo", "fednest", "aggitd", "simfbo", "fedbio", "fedbioacc", "simrabo"]


def flat(x):
    return torch.cat([t.flatten() for t in x.values()])


def normal(seed):
    g = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(2, 3, generator=g, **F64), "b": torch.randn(2, generator=g, **F64)}


@given(st.integers(0, 999), st.floats(1e-3, 1e3), st.floats(1e-3, 10))
def test_a_limited_step_has_the_length_of_the_limit_and_the_way_of_the_full_one(seed, far, limit):
    """A limit is a share of the norm of x, over all its tensors."""
    before, way = normal(seed), normal(seed + 1)
    after = {k: v + far * way[k] for k, v in before.items()}
    found, scalars = limited(before, after, limit, {"kept": 1.0})
    step, full = flat(found) - flat(before), flat(after) - flat(before)
    most = limit * float(flat(before).norm())
    assert float(step.norm()) == pytest.approx(min(most, float(full.norm())), rel=1e-9)
    torch.testing.assert_close(step / step.norm(), full / full.norm())
    assert scalars["limited_steps"] == float(full.norm() > most)
    assert scalars["kept"] == 1.0
    if full.norm() <= most:
        assert all(torch.equal(found[k], after[k]) for k in after)


@given(st.lists(st.floats(0.01, 100), min_size=6, max_size=12))
def test_auto_is_three_times_the_median_of_the_last_five_steps_once_they_are_known(lengths):
    """A step that was shortened counts with its full length; a tenth of ‖x‖ is always allowed."""
    x, scalars = {"x": torch.zeros(2, **F64)}, {}
    for q, length in enumerate(lengths):
        ahead = {"x": x["x"] + length * torch.tensor([0.6, 0.8], **F64)}
        most = float("inf")
        if q >= 5:
            most = max(3 * median(lengths[q - 5 : q]), 0.1 * float(x["x"].norm()))
        moved, scalars = limited(x, ahead, "auto", scalars)
        taken = float((moved["x"] - x["x"]).norm())
        assert taken == pytest.approx(min(length, most), rel=1e-9)
        if abs(length / most - 1) > 1e-9:
            assert scalars["limited_steps"] == float(length > most)
        x = moved


def test_steps_of_length_zero_do_not_stop_x_for_ever():
    x, scalars = {"x": torch.ones(2, **F64)}, {}
    for _ in range(5):
        x, scalars = limited(x, x, "auto", scalars)
    after, _ = limited(x, {"x": 5 * x["x"]}, "auto", scalars)
    assert after["x"].tolist() == pytest.approx([1.1, 1.1])
    zero = {"x": torch.zeros(2, **F64)}
    after, _ = limited(zero, x, "auto", scalars)
    assert after["x"].tolist() == [1.0, 1.0]


def test_a_client_that_is_seldom_present_is_heard():
    """19 clients want x = 1 a little, one wants 10 much: on average x* = 7.5."""

    def client(target, weight):
        def outer(x, y, data):
            return weight * (x["x"] - target).square().sum() / 2 + 0 * y["y"].sum()

        problem = rabo.Problem(
            inner=lambda x, y, data: (y["y"] - x["x"]).square().sum(),
            outer=outer,
            x={"x": torch.ones(1, **F64)},
            y={"y": torch.ones(1, **F64)},
        )
        return rabo.Client(problem.on(inner=None, outer=None))

    clients = [*(client(1.0, 0.1) for _ in range(19)), client(10.0, 5.0)]
    algorithm = rabo.RABO(alpha=0.03, beta=0.4)
    result = rabo.solve(clients, algorithm=algorithm, rounds=800, participation=0.25)
    assert float(result.x["x"]) > 5


@pytest.mark.parametrize("step", [Descent(), Adam()], ids=["descent", "adam"])
@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_shortens_its_step_and_keeps_its_way(name, step):
    problems = federated_quadratics()
    options = {"alpha": 1e-2, "beta": 0.1, "outer_step": step}
    kind = ALGORITHMS[name]
    start = flat(kind().init(problems[0]).x)
    ways = {}
    for limit in (None, 1e-3, 10.0):
        after = one_round(kind(max_outer_step=limit, **options), problems)
        ways[limit] = flat(after.x) - start
        assert after.scalars.get("limited_steps") == {None: None, 1e-3: 1.0, 10.0: 0.0}[limit]
    assert torch.equal(ways[10.0], ways[None])
    short = 1e-3 * start.norm() * ways[None] / ways[None].norm()
    torch.testing.assert_close(ways[1e-3], short, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("step", ["descent", "adam"])
@pytest.mark.parametrize("name", ["rabo", "simrabo"])
def test_entries_that_nobody_covers_keep_their_bits_in_limited_steps(name, step):
    problems = federated_quadratics()
    clients = [rabo.Client(p, 0.5) for p in problems]
    options = {"policy": "static", "max_outer_step": 1e-3, "outer_step": step}
    result = rabo.solve(clients, algorithm=name, rounds=3, **options)
    start = problems[0].start()[0]["x"]
    assert [done.metrics["limited_steps"] for done in result.history] == [1.0] * 3
    assert (result.x["x"] == start).tolist() == [False, False, True]


@pytest.mark.parametrize("name", NAMES)
def test_an_x_that_starts_at_zero_moves(name):
    zero = torch.zeros(2, **F64)
    problem = rabo.Problem(
        inner=lambda x, y, data: (y["y"] - x["x"]).square().sum(),
        outer=lambda x, y, data: (y["y"] - 1).square().sum() + (x["x"] - 1).square().sum(),
        x={"x": zero},
        y={"y": zero},
    )
    client = rabo.Client(problem.on(inner=None, outer=None))
    result = rabo.solve([client], algorithm=name, rounds=8, max_outer_step="auto")
    assert bool((result.x["x"] > 0.01).all())


def test_an_x_that_starts_at_zero_moves_under_a_limit_in_numbers_too():
    zero = torch.zeros(2, **F64)
    problem = rabo.Problem(
        inner=lambda x, y, data: (y["y"] - x["x"]).square().sum(),
        outer=lambda x, y, data: (y["y"] - 1).square().sum(),
        x={"x": zero},
        y={"y": zero},
    )
    client = rabo.Client(problem.on(inner=None, outer=None))
    result = rabo.solve([client], rounds=8, max_outer_step=0.1)
    assert bool((result.x["x"] > 0).all())


def test_the_metrics_say_in_which_rounds_the_step_was_shortened():
    """Steps on x are α·slope while x hardly moves: the seventh is 100 times as long."""
    problems = [replace(p, start_at=1e-12) for p in federated_quadratics()]
    sizes = [1e-9] * 6 + [1e-7] + [1e-9] * 2
    algorithm = rabo.RABO(alpha=lambda q: sizes[q], num_inner_steps=1, beta=1e-9)
    federation = Federation([rabo.Client(p) for p in problems], algorithm)
    lengths, bound, before = [], [], federation.state.x["x"]
    for done in federation.run(9):
        lengths.append(float((federation.state.x["x"] - before).norm()))
        bound.append(done.metrics["limited_steps"])
        before = federation.state.x["x"]
    assert bound == [0] * 6 + [1] + [0] * 2
    assert [length / lengths[0] for length in lengths] == pytest.approx(
        [1] * 6 + [3] + [1] * 2, rel=1e-4
    )


def test_without_a_limit_the_metrics_do_not_speak_of_one():
    clients = [rabo.Client(p) for p in federated_quadratics()]
    result = rabo.solve(clients, rounds=1, max_outer_step=None)
    assert "limited_steps" not in result.history[0].metrics


@pytest.mark.parametrize("limit", [0, 0.0, -1.0, float("inf"), float("nan"), True, "always", [1]])
def test_what_is_no_limit_is_refused(limit):
    with pytest.raises(ValueError, match="max_outer_step"):
        rabo.RABO(max_outer_step=limit)


@pytest.mark.parametrize("limit", [None, "auto", 1, 0.1])
def test_numbers_auto_and_nothing_are_limits(limit):
    assert rabo.RABO(max_outer_step=limit).max_outer_step == limit
