"""AggITD against dense closed forms."""

from dataclasses import dataclass

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
from rabo.algorithms import AggITD, State
from rabo.tasks.quadratic import ClosedForm


@dataclass(frozen=True, kw_only=True)
class Chosen(AggITD):
    """AggITD with a given start of the chain in place of a random one."""

    start: int = 0

    def start_of_chain(self, round):
        return self.start


def expected_step(problems, x, y, num_steps, beta):
    """E[h] over all Q, each equally likely."""
    steps = []
    for start in range(num_steps):
        algorithm = Chosen(
            start=start, num_inner_steps=num_steps, beta=beta, alpha=1.0, num_local_steps=1
        )
        after = one_round(algorithm, problems, State(0, {"x": x}, {"y": y}))
        steps.append(x - after.x["x"])
    return torch.stack(steps).mean(dim=0)


@pytest.mark.parametrize("num_steps", [1, 2, 7])
def test_at_the_inner_solution_the_expected_hypergradient_is_the_truncated_series(
    num_steps, generator
):
    problems = federated_quadratics()
    truth = ClosedForm.of(problems)
    x = torch.randn(3, generator=generator, dtype=torch.float64)
    y = truth.inner_solution(x)
    series = truncated_series(truth.mean, x, y, num_steps, 4.0)
    found = expected_step(problems, x, y, num_steps, 1 / 4.0)
    torch.testing.assert_close(found, series, rtol=0, atol=1e-10)


def test_elsewhere_it_is_the_derivative_along_the_inner_steps(generator):
    """∇_x f − ∇²_xy g·β Σ_t (I − βH)^{N−1−t} ∇_y f(y^t): one term for each start of the chain."""
    problems, N, beta = federated_quadratics(), 4, 0.2
    m = ClosedForm.of(problems).mean
    x, y = (torch.randn(n, generator=generator, dtype=torch.float64) for n in (3, 4))
    found = expected_step(problems, x, y, N, beta)
    factor, total = torch.eye(4, dtype=torch.float64) - beta * m.H, torch.zeros(4).double()
    for _ in range(N):
        total = factor @ total + beta * (m.K @ y - m.t)
        y = y - beta * (m.H @ y - m.B @ x - m.c)
    truth = m.P @ x - m.s + m.B.T @ total
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-10)


def test_the_global_solution_is_where_the_expected_hypergradient_vanishes():
    problems = federated_quadratics(condition=1.5)
    truth = ClosedForm.of(problems)
    x = truth.solution
    step = expected_step(problems, x, truth.inner_solution(x), 23, 1 / 1.5)
    assert float(step.norm()) < 1e-10


def test_it_reaches_the_global_solution_where_chains_do_not_scatter():
    problems = calm_quadratics()
    clients = [rabo.Client(p) for p in problems]
    options = {"alpha": 0.3, "num_inner_steps": 4, "num_local_steps": 2, "outer_step": "descent"}
    result = rabo.solve(clients, algorithm="aggitd", rounds=70, **options)
    assert distance(problems, result.x) < 1e-6


def test_with_one_client_it_is_its_centralised_form():
    [problem] = federated_quadratics(1)
    m, alpha, beta, N, tau = problem.coefficients, 0.1, 0.2, 5, 3
    algorithm = AggITD(alpha=alpha, beta=beta, num_inner_steps=N, num_local_steps=tau)
    state = algorithm.init(problem)
    x, y = state.x["x"], state.y["y"]
    for q in range(4):
        state = one_round(algorithm, [problem], state)
        Q, p = algorithm.start_of_chain(q), torch.zeros(4).double()
        for t in range(N):
            if t == Q:
                p = m.K @ y - m.t
            elif t > Q:
                p = p - beta * m.H @ p
            for _ in range(tau):
                y = y - beta / tau * (m.H @ y - m.B @ x - m.c)
        h, start = m.P @ x - m.s + m.B.T @ (beta * N * p), x
        for _ in range(tau):
            x = x - alpha / tau * (m.P @ (x - start) + h)
    torch.testing.assert_close(state.x["x"], x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state.y["y"], y, rtol=1e-12, atol=1e-12)


def test_impossible_options_are_refused():
    with pytest.raises(ValueError, match="num_inner_steps must be"):
        AggITD(num_inner_steps=0)
    with pytest.raises(ValueError, match="alpha must be"):
        AggITD(alpha=-1.0)
