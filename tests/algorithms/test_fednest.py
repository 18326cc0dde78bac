"""FedNest against dense closed forms."""

from dataclasses import dataclass, replace

import pytest
import torch

import rabo
from problems import calm_quadratics, distance, federated_quadratics, one_round, truncated_series
from rabo.algorithms import FedNest, State
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


def test_the_global_solution_is_where_the_expected_hypergradient_vanishes():
    problems = federated_quadratics(condition=1.5)
    truth = ClosedForm.of(problems)
    x = truth.solution
    step = expected_step(problems, x, truth.inner_solution(x), 23, 1.5)
    assert float(step.norm()) < 1e-10


def test_it_reaches_the_global_solution_where_chains_do_not_scatter():
    problems = calm_quadratics()
    clients = [rabo.Client(p) for p in problems]
    result = rabo.solve(clients, algorithm="fednest", rounds=60, alpha=0.3, num_terms=3)
    assert distance(problems, result.x) < 1e-6


def test_drift_correction_makes_local_steps_agree_on_the_global_inner_solution():
    problems = federated_quadratics()
    truth = ClosedForm.of(problems)
    algorithm = FedNest(num_inner_steps=150, num_local_steps=5, warm_up=1)
    after = one_round(algorithm, problems)
    best = truth.inner_solution(after.x["x"])
    assert float((after.y["y"] - best).norm() / best.norm()) < 1e-8


def test_with_one_client_it_is_its_centralised_form():
    [problem] = federated_quadratics(1)
    m, alpha, beta, T, tau, N, L = problem.coefficients, 0.1, 0.1, 3, 4, 5, 4.0
    algorithm = FedNest(
        alpha=alpha,
        beta=beta,
        num_inner_steps=T,
        num_local_steps=tau,
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
        for _ in range(tau):
            x = x - alpha / tau * (m.P @ (x - start) + h)
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
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FedNest(**options)
