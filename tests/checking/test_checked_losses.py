"""`rabo.check` names broken losses and changes neither clients nor random states."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import dropout

import rabo


def fit(x, y, data):
    return (y["y"] - x["x"] * data).square().sum()


def judge(x, y, data):
    return (y["y"] - 1).square().sum()


def clients_of(inner=fit, outer=judge, number=2, **parts):
    start = {"x": torch.ones(3), "y": torch.zeros(3)}
    parts = {level: parts.get(level, {level: start[level]}) for level in start}
    problem = rabo.Problem(inner=inner, outer=outer, **parts)
    data = [torch.arange(1.0, 4.0) + i for i in range(number)]
    return [rabo.Client(problem.on(inner=own, outer=own)) for own in data]


def test_a_sound_problem_passes():
    found = rabo.check(clients_of())
    assert found.passed
    assert set(found.uses.values()) == {"used", "ignored"}
    assert found.uses["outer x"] == "ignored"  # x acts through y*(x)
    assert found.repeat_gap == 0
    assert found.precision == "float64"


@pytest.mark.parametrize(
    ("losses", "row", "use"),
    [
        ({"outer": lambda x, y, data: x["x"].square().sum()}, "outer loss", "outer y: ignored"),
        ({"outer": lambda x, y, data: judge(x, {"y": y["y"].detach()}, data) + x["x"].sum()},
         "outer loss", "outer y: cut"),
        ({"outer": lambda x, y, data: judge(x, y, data) + (x["x"] * y["y"]).detach().sum()},
         "outer loss", "outer x: cut"),
        ({"inner": lambda x, y, data: fit({"x": x["x"].detach()}, y, data)},
         "inner loss", "inner x: cut"),
        ({"inner": lambda x, y, data: y["y"].square().sum() + x["x"].square().sum()},
         "inner loss", "inner x: ignored"),
        ({"inner": lambda x, y, data: x["x"].square().sum()}, "inner loss", "inner y: ignored"),
        ({"inner": lambda x, y, data: fit(x, y, data).detach()}, "inner loss", "inner y: cut"),
    ],
)  # fmt: skip
def test_a_loss_that_ignores_a_level_or_cuts_its_graph_is_named(losses, row, use):
    found = rabo.check(clients_of(**losses))
    level, status = use.split(": ")
    assert found.uses[level] == status
    assert found[row] in found.problems
    assert found[row].advice
    assert not found.options


def test_a_graph_that_is_cut_for_a_part_of_x_disagrees_with_differences_of_phi():
    def inner(x, y, data):
        return fit({"x": x["a"] + x["b"].detach()}, y, data)

    parts = {"a": torch.ones(3), "b": torch.ones(3)}
    found = rabo.check(clients_of(inner, x=parts))
    assert found["unused parameters"].result == "x.b"
    # ∂Φ/∂a = ∂Φ/∂b, and autograd misses one of them: 1/√2 of the length
    assert found.hypergradient_gap == pytest.approx(0.5**0.5, rel=1e-3)
    assert found["hypergradient"] in found.problems


def test_a_loss_that_is_not_finite_names_level_and_client():
    clients = clients_of(lambda x, y, data: fit(x, y, data) + (data[0] - 2).log().sum(), number=3)
    found = rabo.check(clients)  # data[0] − 2 is −1, 0 and 1
    assert not found.passed
    assert "client 0" in found["finite losses"].result
    assert "client 1" in found["finite losses"].result
    assert "client 2" not in found["finite losses"].result


def counting():
    calls = []

    def inner(x, y, data):
        calls.append(1)
        return fit(x, y, data) + len(calls)

    return inner


@pytest.mark.parametrize(
    "inner",
    [
        lambda x, y, data: fit(x, {"y": dropout(y["y"] + 1, 0.5)}, data),
        lambda x, y, data: fit(x, y, data + np.random.rand()),
        lambda x, y, data: fit(x, y, data + random.random()),
        counting(),
    ],
    ids=["dropout", "numpy", "python", "counter"],
)
def test_losses_that_change_between_evaluations_fail_and_global_random_states_stay(inner):
    clients = clients_of(inner)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    found = rabo.check(clients)
    assert found["repeated evaluations"] in found.problems
    assert found.repeat_gap > 1e-3
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tolist())


def test_a_dropout_module_keeps_one_mask_and_passes():
    torch.manual_seed(0)
    x = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5))
    y = nn.Linear(6, 1)

    def loss(z, y, data):
        return (y(z)[:, 0] - data[1]).square().mean()

    def inner(z, y, data):
        return loss(z, y, data) + 0.1 * sum(t.square().sum() for t in y.values())

    rows = torch.randn(9, 4)
    problem = rabo.Problem(
        inner=inner, outer=loss, features=lambda x, data: x(data[0]), x=x, y=y, example=rows
    )
    clients = [rabo.Client(problem.on(inner=(rows, rows[:, i]), outer=(rows, rows[:, 2])))
               for i in range(2)]  # fmt: skip
    found = rabo.check(clients)
    assert found.repeat_gap == 0
    assert found.hypergradient_gap < 1e-6


def test_clients_stay_as_they_are_and_a_seed_fixes_the_report():
    clients = clients_of()
    before = [t.clone() for part in clients[0].problem.start() for t in part.values()]
    one, other = rabo.check(clients, seed=3), rabo.check(clients, seed=3)
    assert str(one) == str(other)
    after = [t for part in clients[0].problem.start() for t in part.values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_no_more_clients_are_made_than_are_checked():
    made, clients = set(), clients_of(number=6)

    def make(i):
        made.add(i)
        return clients[i]

    found = rabo.check(rabo.OnDemand(6, make), max_clients=2)
    assert made == {0, 1}
    assert (found.num_checked, found.num_clients) == (2, 6)


def test_a_check_without_time_is_skipped_and_no_failure():
    found = rabo.check(clients_of(), max_seconds=1e-9)
    assert [f.verdict for f in found.findings[:1]] == ["skipped"]
    assert found.passed


def test_a_failure_can_raise_and_a_warning_does_not():
    with pytest.raises(rabo.ProblemCheckError, match="outer loss"):
        rabo.check(clients_of(outer=lambda x, y, data: x["x"].sum()), raise_exception=True)
    flat = clients_of(lambda x, y, data: fit(x, {"y": y["y"][:2]}, data[:2]),
                             x={"x": torch.ones(2)})  # fmt: skip
    found = rabo.check(flat, raise_exception=True)
    assert found.warnings


def test_every_finding_is_in_the_table():
    found = rabo.check(clients_of())
    assert all(f.check in str(found) for f in found.findings)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"max_clients": 0}, "max_clients"), ({"max_seconds": 0}, "max_seconds")],
)
def test_limits_that_allow_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        rabo.check(clients_of(), **options)
    with pytest.raises(ValueError, match="at least one client"):
        rabo.check([])
