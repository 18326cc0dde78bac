from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import rabo
from known_problems import curved_problem, dense_hypergradient
from rabo.exchange.cost import measure
from rabo.pruning.policies import Random, Whole
from rabo.tree import flatten, leaves

LONG = {
    "conjugate-gradient": rabo.ConjugateGradient(num_iterations=30),
    "neumann": rabo.Neumann(num_terms=2000),
    "unrolled": rabo.Unrolled(num_steps=1200),
    "directional-difference": rabo.DirectionalDifference(num_iterations=30),
    "coordinate-difference": rabo.CoordinateDifference(num_iterations=30, mu=1e-6),
}
ERROR = {
    "conjugate-gradient": 1e-8,
    "neumann": 1e-8,
    "unrolled": 1e-8,
    "directional-difference": 1e-6,
    "coordinate-difference": 1e-4,
}


def inner_optimum(problem, x, y):
    """y*(x) by Newton steps."""
    (name, value) = next(iter(y.items()))
    for _ in range(30):
        g = lambda v: problem.inner(x, {name: v}, None)  # noqa: E731
        slope = torch.autograd.functional.jacobian(g, value).flatten()
        hessian = torch.autograd.functional.hessian(g, value)
        hessian = hessian.reshape(value.numel(), value.numel())
        value = value - torch.linalg.solve(hessian, slope).reshape(value.shape)
    return {name: value}


def relative_error(estimate, truth):
    found = flatten(leaves(estimate.value)).flatten()
    return float((found - truth.flatten()).norm() / truth.norm())


@pytest.mark.parametrize("name", LONG)
@settings(max_examples=6)
@given(seed=st.integers(0, 10**6))
def test_an_estimator_run_long_gives_the_dense_hypergradient(name, seed):
    problem = curved_problem(seed)
    x, y = problem.start()
    if name == "unrolled":  # differentiates through its own steps, which end at y*(x)
        y = inner_optimum(problem, x, y)
        truth = dense_hypergradient(problem, x, y, problem.data)
        y = {"y": y["y"] + 0.1}
    else:
        truth = dense_hypergradient(problem, x, y, problem.data)
    estimate = LONG[name](problem, x, y, problem.data)
    assert relative_error(estimate, truth) < ERROR[name]
    assert estimate.evaluations > 0


@pytest.mark.parametrize("name", LONG)
def test_an_estimator_on_a_submodel_gives_the_dense_hypergradient_of_the_submodel(name, generator):
    problem = curved_problem(3, dim_x=8, dim_y=6, axes=True)
    x, y = problem.start()
    parts = Random()(Whole(problem.channels, x, y), 0.5, 0, 0, generator)
    small, u, v = problem.restrict(parts), parts.x.extract(x), parts.y.extract(y)
    if name == "unrolled":
        v = inner_optimum(small, u, v)
    truth = dense_hypergradient(small, u, v, problem.data)
    assert truth.shape == (4,)
    assert relative_error(LONG[name](small, u, v, problem.data), truth) < ERROR[name]


def test_sampled_coordinates_agree_with_all_where_they_were_sampled():
    problem = curved_problem(1)
    x, y = problem.start()
    everything = rabo.CoordinateDifference()(problem, x, y, problem.data).value["x"]
    some = rabo.CoordinateDifference(num_coordinates=2)(
        problem, x, y, problem.data, torch.Generator().manual_seed(0)
    ).value["x"]
    assert int((some == everything).sum()) == 2


def test_truncation_drops_the_oldest_steps():
    problem = curved_problem(2)
    x, y = problem.start()
    y = inner_optimum(problem, x, y)
    # at y*, every step contributes a term of the Neumann series
    for depth in (1, 7, 20):
        unrolled = rabo.Unrolled(num_steps=20, truncation=depth, step_size=0.02)
        series = rabo.Neumann(num_terms=depth, step_size=0.02)
        a, b = (e(problem, x, y, problem.data).value["x"] for e in (unrolled, series))
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def test_unrolling_keeps_memory_bounded():
    data = torch.randn(256, 64)
    problem = rabo.Problem(
        inner=lambda x, y, d: (
            (torch.tanh(d @ y["w"]) * x["s"]).square().mean() + y["w"].square().sum()
        ),
        outer=lambda x, y, d: (d @ y["w"]).square().mean(),
        x={"s": torch.ones(1)},
        y={"w": torch.randn(64)},
    ).on(inner=data, outer=data)
    x, y = problem.start()

    def peak(steps):
        estimator = rabo.Unrolled(num_steps=steps, step_size=0.01)
        return measure(lambda: estimator(problem, x, y, problem.data))[1].peak_memory_bytes

    assert peak(400) < 1.5 * peak(25)  # sixteen times the steps, four times the stored points


def test_features_are_computed_once_and_change_nothing():
    torch.manual_seed(0)
    backbone, head = nn.Sequential(nn.Linear(6, 5), nn.Tanh()), nn.Linear(5, 3)
    data = torch.randn(20, 6), torch.randint(3, (20,))
    calls = []
    backbone.register_forward_hook(lambda *_: calls.append(1))

    def penalised(z, y, d):
        return F.cross_entropy(y(z), d[1]) + 0.1 * y["weight"].square().sum()

    def plain(z, y, d):
        return F.cross_entropy(y(z), d[1])

    shared = {"x": backbone.double(), "y": head.double(), "prune": "none"}
    with_features = rabo.Problem(
        inner=penalised, outer=plain, features=lambda x, d: x(d[0]), **shared
    )
    without = rabo.Problem(
        inner=lambda x, y, d: penalised(x(d[0]), y, d),
        outer=lambda x, y, d: plain(x(d[0]), y, d),
        **shared,
    )
    data = data[0].double(), data[1]
    for estimator in (rabo.ConjugateGradient(), rabo.DirectionalDifference(), rabo.Unrolled()):
        found = []
        for problem in (with_features, without):
            bound = problem.on(inner=data, outer=data)
            calls.clear()
            found.append(estimator(bound, *bound.start(), bound.data).value)
            if problem is with_features:
                assert len(calls) == 2  # once for g's data, once for f's
        for name in found[0]:
            torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["conjugate-gradient", "directional-difference", "neumann"])
def test_independent_copies_of_y_are_solved_block_by_block(name):
    whole = curved_problem(5, copies=3)
    single = curved_problem(5)
    x, y = single.start()
    copies = [{"y": y["y"] + i} for i in range(3)]
    stacked = {"y": torch.stack([c["y"] for c in copies])}

    def summed(level):
        loss = getattr(single.problem, level)
        return lambda u, v, d: sum(loss(u, {"y": row}, d) for row in v["y"])

    problem = replace(whole.problem, inner=summed("inner"), outer=summed("outer"))
    bound = problem.on(inner=None, outer=None)
    found = LONG[name](bound, x, stacked, bound.data).value["x"]
    truth = sum(dense_hypergradient(single, x, c, single.data) for c in copies)
    torch.testing.assert_close(found, truth, rtol=1e-6, atol=1e-7)


def test_cg_reports_its_residual_and_stops_at_its_tolerance():
    problem = curved_problem(7, dim_y=12)
    x, y = problem.start()
    short = rabo.ConjugateGradient(num_iterations=2)(problem, x, y, problem.data)
    long = rabo.ConjugateGradient(num_iterations=50, tolerance=1e-6)(problem, x, y, problem.data)
    assert float(short.residual) > float(long.residual)
    assert float(long.residual) <= 1e-6
    assert long.iterations < 50


def test_cg_stops_where_curvature_is_negative():
    problem = rabo.Problem(
        inner=lambda x, y, d: -y["y"].square().sum() * x["x"].sum(),
        outer=lambda x, y, d: y["y"].sum() + x["x"].sum(),
        x={"x": torch.ones(2)},
        y={"y": torch.ones(3)},
    ).on(inner=None, outer=None)
    found = rabo.ConjugateGradient()(problem, *problem.start(), problem.data)
    assert float(found.residual) == pytest.approx(1)
    assert torch.equal(found.value["x"], torch.ones(2))
    damped = rabo.ConjugateGradient(damping=10.0)(problem, *problem.start(), problem.data)
    assert float(damped.residual) < 1e-5


@pytest.mark.parametrize("estimator", LONG.values(), ids=LONG)
def test_a_value_that_is_not_finite_is_raised_not_returned(estimator):
    problem = rabo.Problem(
        inner=lambda x, y, d: y["y"].square().sum() + (x["x"].sum() * float("nan")) * y["y"].sum(),
        outer=lambda x, y, d: y["y"].sum(),
        x={"x": torch.ones(2)},
        y={"y": torch.ones(2)},
    ).on(inner=None, outer=None)
    with pytest.raises(rabo.NonFiniteError, match=r"NaN or infinite|outer loss is nan"):
        estimator(problem, *problem.start(), problem.data)


@pytest.mark.parametrize(
    "make",
    [
        lambda: rabo.ConjugateGradient(num_iterations=-1),
        lambda: rabo.ConjugateGradient(damping=-1),
        lambda: rabo.DirectionalDifference(tolerance=-1),
        lambda: rabo.Neumann(num_terms=0),
        lambda: rabo.Neumann(step_size=-1),
        lambda: rabo.Unrolled(num_steps=0),
        lambda: rabo.Unrolled(num_steps=3, truncation=4),
        lambda: rabo.CoordinateDifference(mu=0),
        lambda: rabo.CoordinateDifference(num_coordinates=0),
    ],
)
def test_impossible_settings_are_refused_where_they_are_made(make):
    with pytest.raises(ValueError, match="must"):
        make()


@pytest.mark.parametrize("name", ["recomputed", "directional-difference", "coordinate-difference"])
def test_dropout_is_one_realisation_per_estimate(name):
    """Estimators that evaluate g again must see the same units dropped."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 1)).double()
    data = torch.randn(30, 4).double()

    def inner(x, y, d):
        return (y(d) - x["x"].sum()).square().mean() + sum(w.square().sum() for w in y.values())

    problem = rabo.Problem(
        inner=inner,
        outer=lambda x, y, d: (y(d) - 1).square().mean(),
        x={"x": torch.ones(2).double()},
        y=net,
        prune="none",
    ).on(inner=data, outer=data)
    torch.manual_seed(1)
    exact = rabo.ConjugateGradient(num_iterations=60)(problem, *problem.start(), problem.data)
    torch.manual_seed(1)
    again = rabo.ConjugateGradient(num_iterations=60, products="recomputed")
    found = LONG.get(name, again)(problem, *problem.start(), problem.data)
    torch.testing.assert_close(found.value["x"], exact.value["x"], rtol=1e-3, atol=1e-6)


def test_features_may_carry_labels_along():
    torch.manual_seed(0)
    data = torch.randn(12, 3), torch.randint(2, (12,))

    def loss(z, y, d):
        return F.cross_entropy(z[0] @ y["w"], z[1]) + y["w"].square().sum()

    problem = rabo.Problem(
        inner=loss,
        outer=loss,
        features=lambda x, d: (d[0] @ x["x"], d[1]),
        x={"x": torch.randn(3, 4)},
        y={"w": torch.randn(4, 2)},
    ).on(inner=data, outer=data)
    found = [
        estimator(problem, *problem.start(), problem.data).value["x"]
        for estimator in (LONG["conjugate-gradient"], LONG["directional-difference"])
    ]
    torch.testing.assert_close(found[0], found[1], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", LONG)
def test_an_outer_loss_without_y_leaves_its_own_gradient(name):
    estimator = LONG[name]
    problem = rabo.Problem(
        inner=lambda x, y, d: (y["y"] - x["x"]).square().sum(),
        outer=lambda x, y, d: x["x"].square().sum(),
        x={"x": torch.ones(2)},
        y={"y": torch.zeros(2)},
    ).on(inner=None, outer=None)
    found = estimator(problem, *problem.start(), problem.data)
    torch.testing.assert_close(found.value["x"], 2 * torch.ones(2))
