"""FedNest against dense closed forms."""

import warnings
from dataclasses import dataclass, replace

import pytest
import torch

import rabo
from known_problems import (
    calm_quadratics,
    distance,
    federated_quadratics,
    one_round,
    truncated_series,
)
from rabo.algorithms import AggITD, Cohort, FedNest, State
from rabo.execution import InProcess
from rabo.tasks.quadratic import ClosedForm

STILL = 1e-200  # a step size that leaves y where it is


@dataclass(frozen=True, kw_only=True)
class Chosen(FedNest):
    """FedNest with a given number of factors in place of a random one."""

    factors: int = 0

    def num_factors(self, round, chain=0):
        return self.factors


def expected_step(problems, x, y, num_terms, L):
    """E[h] over all N', each equally likely."""
    steps = []
    for factors in range(num_terms):
        algorithm = Chosen(
            factors=factors,
            num_terms=num_terms,
            smoothness=L,
            beta=STILL,
            alpha=1.0,
            num_inner_steps=1,
            num_local_steps=1,
        )
        after = one_round(algorithm, problems, State(0, {"x": x}, {"y": y}))
        steps.append(x - after.x["x"])
    return torch.stack(steps).mean(dim=0)


@pytest.mark.parametrize("num_terms", [1, 2, 7])
def test_the_expected_hypergradient_is_the_truncated_series_of_the_mean_hessian(
    num_terms, generator
):
    problems = federated_quadratics()
    x, y = (torch.randn(n, generator=generator, dtype=torch.float64) for n in (3, 4))
    truth = truncated_series(ClosedForm.of(problems).mean, x, y, num_terms, 4.0)
    torch.testing.assert_close(
        expected_step(problems, x, y, num_terms, 4.0), truth, rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("num_terms", [1, 2, 7])
def test_the_truncated_series_takes_a_fixed_number_of_products_of_the_mean_hessian(
    num_terms, generator
):
    problems, L = federated_quadratics(), 4.0
    x, y = (torch.randn(n, generator=generator, dtype=torch.float64) for n in (3, 4))
    algorithm = FedNest(
        series="truncated",
        num_terms=num_terms,
        smoothness=L,
        beta=STILL,
        alpha=1.0,
        num_inner_steps=1,
        num_local_steps=1,
    )
    state = State(0, {"x": x}, {"y": y})
    after = one_round(algorithm, problems, state)
    truth = truncated_series(ClosedForm.of(problems).mean, x, y, num_terms, L)
    torch.testing.assert_close(x - after.x["x"], truth, rtol=0, atol=1e-12)


def test_separate_clients_move_y_with_one_half_and_x_with_the_other(generator):
    problems = dict(enumerate(federated_quadratics(5)))
    options = {"num_inner_steps": 2, "num_local_steps": 3, "smoothness": 4.0, "alpha": 0.1}
    algorithm = FedNest(separate_clients=True, beta=0.1, **options)
    x, y = (torch.randn(n, generator=generator, dtype=torch.float64) for n in (3, 4))
    state = State(0, {"x": x}, {"y": y})
    after = one_round(algorithm, list(problems.values()), state)
    first, second = algorithm.halves(0, set(problems))
    assert first | second == set(problems)
    assert (len(first), len(second)) == (3, 2)
    inner = one_round(FedNest(beta=0.1, **options), [problems[i] for i in sorted(first)], state)
    torch.testing.assert_close(after.y["y"], inner.y["y"], rtol=1e-13, atol=1e-13)
    here = replace(state, y=inner.y)
    outer = one_round(FedNest(beta=STILL, **options), [problems[i] for i in sorted(second)], here)
    torch.testing.assert_close(after.x["x"], outer.x["x"], rtol=1e-13, atol=1e-13)
    others = {frozenset(algorithm.halves(q, set(problems))[0]) for q in range(20)}
    assert len(others) > 1


def test_a_single_client_takes_both_levels():
    [problem] = federated_quadratics(1)
    options = {"num_inner_steps": 2, "smoothness": 4.0, "alpha": 0.1, "beta": 0.1}
    together = one_round(FedNest(**options), [problem])
    separate = one_round(FedNest(separate_clients=True, **options), [problem])
    assert torch.equal(together.x["x"], separate.x["x"])
    assert torch.equal(together.y["y"], separate.y["y"])


def mean_of_points(batch_size, sample=None):
    """g = ½|y − x|² + y·d and f = ½|x − e|² + ½|y|², means over the client's points d and e."""
    g = torch.Generator().manual_seed(0)
    problem = rabo.Problem(
        inner=lambda x, y, d: (y["y"] - x["x"]).square().sum() / 2 + (d @ y["y"]).mean(),
        outer=lambda x, y, e: (x["x"] - e).square().sum(1).mean() / 2 + y["y"].square().sum() / 2,
        x={"x": torch.ones(2).double()},
        y={"y": torch.zeros(2).double()},
        batch_size=batch_size,
        sample=sample,
    )
    data = torch.randn(3, 2, 12, 2, generator=g, dtype=torch.float64)
    return [problem.on(inner=inner, outer=outer) for inner, outer in data]


@pytest.mark.parametrize("kind", [FedNest, AggITD])
def test_full_snapshots_make_minibatch_steps_those_of_all_data_where_curvatures_agree(kind):
    """The drift of a batch is then that of all data, so only the snapshots can differ."""
    options = {"num_inner_steps": 2, "num_local_steps": 4, "alpha": 0.2, "beta": 0.3}
    whole = one_round(kind(**options), mean_of_points(None))
    full = one_round(kind(snapshot="full", **options), mean_of_points(3))
    drawn = one_round(kind(**options), mean_of_points(3))
    for level, key in (("x", "x"), ("y", "y")):
        truth, found, other = (getattr(s, level)[key] for s in (whole, full, drawn))
        torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)
        assert float((other - truth).norm()) > 1e-3


def test_full_snapshots_need_data_to_be_there():
    problems = mean_of_points(None, sample=lambda data, generator: data)
    with pytest.raises(ValueError, match=r"snapshot='full' needs .* use snapshot='batch'"):
        FedNest(snapshot="full").init(problems[0])


def test_slopes_that_share_memory_do_not_disturb_each_other():
    """∇f is the same tensor for both parts of x, as autograd returns it for a sum."""
    target = torch.tensor([1.0, 2.0]).double()
    problem = rabo.Problem(
        inner=lambda x, y, d: y["y"].square().sum() / 2,
        outer=lambda x, y, d: (x["a"] + x["b"] - target).square().sum() / 2,
        x={"a": torch.zeros(2).double(), "b": torch.zeros(2).double()},
        y={"y": torch.zeros(2).double()},
    ).on(inner=None, outer=None)
    after = one_round(FedNest(alpha=0.3, beta=0.1, smoothness=1.0, num_local_steps=3), [problem])
    total = torch.zeros(2).double()
    for _ in range(3):
        total = total - 2 * 0.1 * (total - target)  # α/τ = 0.1, along a and b alike
    for part in after.x.values():
        torch.testing.assert_close(part, total / 2, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("factor", "shrinks"), [(0.95, True), (1.05, False)])
def test_beta_may_be_as_large_as_2_tau_over_the_curvature_and_a_warning_says_more(factor, shrinks):
    """With like clients an exchange multiplies the error by (I − (β/τ)H)^τ."""
    tau, [problem] = 10, federated_quadratics(1)
    largest = float(torch.linalg.eigvalsh(problem.coefficients.H)[-1])
    beta = factor * 2 * tau / largest
    algorithm = FedNest(beta=beta, num_local_steps=tau, num_inner_steps=20, warm_up=1)
    after = one_round(algorithm, [problem, problem])
    best = ClosedForm.of([problem]).inner_solution(after.x["x"])
    assert (float((after.y["y"] - best).norm()) < 0.01 * float(best.norm())) == shrinks
    state, cohort = algorithm.init(problem), Cohort(problem.channels, {0: 1.0})
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        algorithm.prepare(state, cohort, InProcess({0: problem}))
    assert [w.category for w in found] == ([] if shrinks else [rabo.StepSizeWarning])
    assert shrinks or f"{2 * tau / largest:g}" in str(found[0].message)


def test_the_global_solution_is_where_the_expected_hypergradient_vanishes():
    problems = federated_quadratics(condition=1.5)
    truth = ClosedForm.of(problems)
    x = truth.solution
    step = expected_step(problems, x, truth.inner_solution(x), 23, 1.5)
    assert float(step.norm()) < 1e-10


def test_it_reaches_the_global_solution_where_chains_do_not_scatter():
    problems = calm_quadratics()
    clients = [rabo.Client(p) for p in problems]
    result = rabo.solve(
        clients, algorithm="fednest", rounds=60, alpha=0.3, num_terms=3, outer_step="descent"
    )
    assert distance(problems, result.x) < 1e-6


def test_drift_correction_makes_local_steps_agree_on_the_global_inner_solution():
    problems = federated_quadratics()
    truth = ClosedForm.of(problems)
    algorithm = FedNest(num_inner_steps=150, num_local_steps=5, warm_up=1)
    after = one_round(algorithm, problems)
    best = truth.inner_solution(after.x["x"])
    assert float((after.y["y"] - best).norm() / best.norm()) < 1e-8


@pytest.mark.parametrize("tau_x", [None, 1, 7])
def test_with_one_client_it_is_its_centralised_form(tau_x):
    [problem] = federated_quadratics(1)
    m, alpha, beta, T, tau, N, L = problem.coefficients, 0.1, 0.1, 3, 4, 5, 4.0
    algorithm = FedNest(
        alpha=alpha,
        beta=beta,
        num_inner_steps=T,
        num_local_steps=tau,
        num_local_steps_x=tau_x,
        num_terms=N,
        smoothness=L,
    )
    state = algorithm.init(problem)
    x, y = state.x["x"], state.y["y"]
    for q in range(4):
        state = one_round(algorithm, [problem], state)
        for _ in range(T * tau):
            y = y - beta / tau * (m.H @ y - m.B @ x - m.c)
        p = N / L * (m.K @ y - m.t)
        for _ in range(algorithm.num_factors(q)):
            p = p - m.H @ p / L
        h, start = m.P @ x - m.s + m.B.T @ p, x
        for _ in range(tau_x or tau):
            x = x - alpha / (tau_x or tau) * (m.P @ (x - start) + h)
    torch.testing.assert_close(state.x["x"], x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state.y["y"], y, rtol=1e-12, atol=1e-12)


def test_on_submodels_every_mean_is_over_the_clients_that_hold_an_entry():
    problems = federated_quadratics()
    alpha, beta, N, L, factors = 0.1, 0.1, 3, 4.0, 2
    algorithm = Chosen(
        factors=factors,
        policy=rabo.Static(),
        alpha=alpha,
        beta=beta,
        num_inner_steps=1,
        num_local_steps=1,
        num_terms=N,
        smoothness=L,
    )
    widths = [1.0, 0.5, 0.5]
    after = one_round(algorithm, problems, widths=widths)
    held = [(3, 4), (2, 2), (2, 2)]

    def mean(size, parts):
        total, count = torch.zeros(size, dtype=torch.float64), torch.zeros(size)
        for part in parts:
            total[: len(part)] += part
            count[: len(part)] += 1
        return total / count

    own = [
        type(m)(m.H[:j, :j], m.B[:j, :i], m.c[:j], m.K[:j, :j], m.t[:j], m.P[:i, :i], m.s[:i])
        for m, (i, j) in zip((p.coefficients for p in problems), held, strict=True)
    ]
    x, y = (t for part in problems[0].start() for t in part.values())
    slopes = [m.H @ y[:j] - m.B @ x[:i] - m.c for m, (i, j) in zip(own, held, strict=True)]
    y = y - beta * mean(4, slopes)
    p = N / L * mean(4, [m.K @ y[:j] - m.t for m, (_, j) in zip(own, held, strict=True)])
    for _ in range(factors):
        p = p - mean(4, [m.H @ p[:j] for m, (_, j) in zip(own, held, strict=True)]) / L
    slopes = [m.P @ x[:i] - m.s + m.B.T @ p[:j] for m, (i, j) in zip(own, held, strict=True)]
    torch.testing.assert_close(after.y["y"], y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(after.x["x"], x - alpha * mean(3, slopes), rtol=1e-12, atol=1e-12)


def test_momentum_makes_heavy_ball_steps_on_the_server():
    problems = federated_quadratics()
    algorithm = FedNest(momentum=0.5, beta=0.1, num_inner_steps=3, num_local_steps=1, warm_up=1)
    after = one_round(algorithm, problems)
    m = ClosedForm.of(problems).mean
    x, y = (t for part in problems[0].start() for t in part.values())
    velocity = torch.zeros_like(y)
    for _ in range(3):
        velocity = 0.5 * velocity + 0.1 * (m.H @ y - m.B @ x - m.c)
        y = y - velocity
    torch.testing.assert_close(after.y["y"], y, rtol=1e-12, atol=1e-12)


def test_copies_of_y_are_refused_with_what_to_use_instead():
    problem = replace(federated_quadratics(1)[0])
    object.__setattr__(problem, "copies", 4)
    with pytest.raises(ValueError, match=r"4 copies of y.*use fedmbo"):
        FedNest().init(problem)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_terms": 0}, "num_terms must be"),
        ({"smoothness": 0.0}, "smoothness must be"),
        ({"num_local_steps": 0}, "num_local_steps must be"),
        ({"num_inner_steps": 0}, "num_inner_steps must be"),
        ({"alpha": 0.0}, "alpha must be"),
        ({"warm_up": -1}, "warm_up must be"),
        ({"momentum": 1.0}, "momentum must"),
        ({"num_local_steps_x": 0}, "num_local_steps_x must be"),
        ({"series": "finite"}, "series must be"),
        ({"snapshot": "whole"}, "snapshot must be"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FedNest(**options)
