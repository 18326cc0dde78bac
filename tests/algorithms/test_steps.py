"""Server steps, schedules and local momentum against torch's own optimisers."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

import rabo
from known_problems import curved_problem
from rabo.algorithms import ALGORITHMS, Adam, Cosine, FedAvg
from rabo.exchange.covering import CoveredMean
from rabo.federation.federation import Federation
from rabo.federation.solve import make_algorithm
from rabo.hypergradients.linearisation import Exact, View
from rabo.pruning.channels import declare
from rabo.pruning.submodel import cut
from rabo.seeding import stream
from rabo.tasks.quadratic import random_quadratic

X = {"x": torch.tensor([1.0, -2.0, 3.0, 0.5])}
CHANNELS = declare({"x.x": ("x",)}, X, {})

BILEVEL = [name for name, kind in ALGORITHMS.items() if "alpha" in {f.name for f in fields(kind)}]


def averaged(slope, kept):
    part = cut(CHANNELS, {"x": kept}).x
    mean = CoveredMean(X)
    mean.add(part, part.extract({"x": slope}))
    return mean


def test_adam_on_the_server_is_adam_where_everything_is_covered():
    parameter = torch.nn.Parameter(X["x"].clone())
    reference = torch.optim.Adam([parameter], lr=0.1)
    x, memory = X, {}
    for t in range(5):
        slope = torch.sin(torch.arange(4.0) + t)
        parameter.grad = slope.clone()
        reference.step()
        x, memory = Adam()(x, averaged(slope, torch.arange(4)), 0.1, memory)
    torch.testing.assert_close(x["x"], parameter.detach())


def test_adam_leaves_uncovered_entries_and_their_moments_alone():
    x, memory = X, {}
    for _ in range(3):
        x, memory = Adam()(x, averaged(torch.ones(4), torch.tensor([0, 2])), 0.1, memory)
    assert torch.equal(x["x"][[1, 3]], X["x"][[1, 3]])
    assert memory["steps"]["x"].tolist() == [3, 0, 3, 0]
    late, _ = Adam()(x, averaged(torch.ones(4), torch.tensor([1])), 0.1, memory)
    assert float(late["x"][1]) == pytest.approx(-2.1, abs=1e-4)  # its own first step


def test_a_cosine_falls_from_start_to_zero():
    cosine = Cosine(0.4, 10)
    assert [cosine(q) for q in (0, 5, 10, 11)] == pytest.approx([0.4, 0.2, 0, 0])
    for start, rounds in ((-0.3, 10), (0.1, 0)):
        with pytest.raises(ValueError, match="must be"):
            Cosine(start, rounds)


@pytest.mark.parametrize("step", [0.0, -1, float("inf"), float("nan"), True, "fast", Cosine, None])
def test_what_is_no_step_size_is_refused(step):
    for name in ("alpha", "beta"):
        if name == "alpha" and step is None:
            continue  # the default of the outer step
        with pytest.raises(ValueError, match=f"{name} must be a positive number"):
            rabo.RABO(**{name: step})


def test_numbers_of_numpy_are_step_sizes():
    for number in (np.float32(0.1), np.int64(1)):
        assert rabo.RABO(alpha=number, beta=number).alpha == number


@pytest.mark.parametrize("name", BILEVEL)
def test_the_first_step_on_x_is_in_proportion_to_alpha(name):
    problem = random_quadratic(stream(0), 3, 4).client(stream(1))
    start, moved = problem.start()[0]["x"], []
    for alpha in (1e-4, 2e-4):
        x = rabo.solve([rabo.Client(problem)], algorithm=name, alpha=alpha, rounds=1).x["x"]
        moved.append(x - start)
    assert float(moved[0].norm()) > 0
    torch.testing.assert_close(2 * moved[0], moved[1], rtol=1e-2, atol=1e-9)


CHANGING = [*((name, {}, "alpha") for name in BILEVEL)]
CHANGING += [("static", {"levels": "both", "beta": 0.01}, "beta_x")]


@pytest.mark.parametrize(("name", "options", "step"), CHANGING)
def test_a_step_size_may_change_from_round_to_round(name, options, step):
    clients = [rabo.Client(random_quadratic(stream(0), 3, 4).client(stream(i))) for i in range(2)]
    options = {"seed": 3, **options}

    def begun(size):
        return Federation(clients, make_algorithm(name, **options, **{step: size}))

    scheduled, by_hand = begun(lambda round: [0.02, 0.005][round]), begun(0.02)
    list(scheduled.run(2))
    list(by_hand.run(1))
    by_hand.algorithm = replace(by_hand.algorithm, **{step: 0.005})
    list(by_hand.run(1))
    assert torch.equal(scheduled.state.x["x"], by_hand.state.x["x"])
    assert torch.equal(scheduled.state.y["y"], by_hand.state.y["y"])
    kept = begun(0.02)
    list(kept.run(2))
    assert not torch.equal(scheduled.state.x["x"], kept.state.x["x"])


def test_a_step_size_that_falls_below_zero_is_named_with_its_round():
    problem = random_quadratic(stream(0), 3, 4).client(stream(1))
    with pytest.raises(ValueError, match="alpha must not be negative, got -1 in round 2"):
        rabo.solve([rabo.Client(problem)], alpha=lambda round: [0.01, -1][round], rounds=2)


def test_a_step_size_that_is_no_number_is_named_with_its_round():
    problem = random_quadratic(stream(0), 3, 4).client(stream(1))
    with pytest.raises(ValueError, match="alpha must be a number, got None in round 1"):
        rabo.solve([rabo.Client(problem)], alpha=lambda round: None, rounds=2)


def test_local_momentum_is_that_of_sgd():
    family = random_quadratic(stream(0), 3, 4)
    problem = family.client(stream(1))
    algorithm = FedAvg(levels="y", beta=0.02, momentum=0.9, num_inner_steps=6)
    result = rabo.solve([rabo.Client(problem)], algorithm=algorithm, rounds=1)
    x, y = problem.start()
    parameter = torch.nn.Parameter(y["y"].clone())
    sgd = torch.optim.SGD([parameter], lr=0.02, momentum=0.9)
    for _ in range(6):
        sgd.zero_grad()
        problem.inner(x, {"y": parameter}, None).backward()
        sgd.step()
    torch.testing.assert_close(result.y["y"], parameter.detach())


def test_fedavg_trains_y_and_leaves_x_alone():
    problem = random_quadratic(stream(0), 3, 4).client(stream(1))
    result = rabo.solve([rabo.Client(problem)], algorithm="fedavg", levels="y", rounds=200)
    x, _ = problem.start()
    truth = torch.linalg.solve(
        problem.coefficients.H, problem.coefficients.B @ x["x"] + problem.coefficients.c
    )
    assert torch.equal(result.x["x"], x["x"])
    torch.testing.assert_close(result.y["y"], truth)
    assert result.coverage["x_trained"] == 0


def test_x_waits_for_the_warm_up():
    problem = random_quadratic(stream(0), 3, 4).client(stream(1))
    states = []
    federation = rabo.Federation([rabo.Client(problem)], rabo.RABO(warm_up=2))
    for _ in federation.run(3):
        states.append(federation.state.x["x"])
    x, _ = problem.start()
    assert [torch.equal(s, x["x"]) for s in states] == [True, True, False]


def test_recomputed_products_are_exact_products():
    problem = curved_problem(0)
    x, y = problem.start()
    held, fresh = (Exact(View(problem, x, y, problem.data), hold=hold) for hold in (True, False))
    p = torch.randn(held.rhs.shape, dtype=torch.float64, generator=stream(0))
    torch.testing.assert_close(fresh.product(p), held.product(p))
    torch.testing.assert_close(fresh.pull_back(p)["x"], held.pull_back(p)["x"])
    torch.testing.assert_close(fresh.rhs, held.rhs)


@pytest.mark.parametrize(
    "make",
    [
        lambda: FedAvg(momentum=1.0),
        lambda: rabo.RABO(warm_up=-1),
        lambda: rabo.Neumann(products="fast"),
    ],
)
def test_impossible_settings_are_refused(make):
    with pytest.raises(ValueError, match=r"must|unknown"):
        make()
