"""FedMBO against dense closed forms."""

import itertools
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch

import rabo
from known_problems import (
    calm_quadratics,
    curved_problem,
    dense_hypergradient,
    distance,
    federated_quadratics,
    one_round,
    truncated_series,
)
from rabo.algorithms import FedMBO, State
from rabo.problems.bilevel import Batch
from rabo.tasks.quadratic import ClosedForm

STILL = 1e-200  # a step size that leaves y where it is
L = 4.0


@dataclass(frozen=True, kw_only=True)
class Chosen(FedMBO):
    """FedMBO with given lengths of chains and given relays in place of random ones."""

    lengths: tuple[int, ...] = ()
    orders: tuple[tuple[int, ...], ...] = field(default=())

    def num_factors(self, round, chain=0):
        return self.lengths[chain]

    def relay(self, round, step, present):
        return [present[i] for i in self.orders[step]]


def step_with(problems, x, y, lengths, orders):
    algorithm = Chosen(
        lengths=lengths,
        orders=orders,
        num_terms=len(orders),
        smoothness=L,
        beta=STILL,
        alpha=1.0,
        num_inner_steps=1,
    )
    after = one_round(algorithm, problems, State(0, {"x": x}, {"y": y}, {}, {"copies": 1}))
    return x - after.x["x"]


def all_steps(problems, x, y, num_terms):
    """The step on x for every choice of lengths and relays, which are equally likely."""
    orders = itertools.permutations(range(len(problems)))
    choices = itertools.product(
        itertools.product(range(num_terms), repeat=len(problems)),
        itertools.product(orders, repeat=num_terms),
    )
    return torch.stack([step_with(problems, x, y, *choice) for choice in choices])


@pytest.fixture
def point(generator):
    return [torch.randn(n, generator=generator, dtype=torch.float64) for n in (3, 4)]


@pytest.mark.parametrize(("num_clients", "num_terms"), [(2, 1), (2, 3), (3, 2)])
def test_the_expected_hypergradient_is_the_truncated_series_of_the_mean_problem(
    num_clients, num_terms, point
):
    problems = federated_quadratics(num_clients)
    truth = truncated_series(ClosedForm.of(problems).mean, *point, num_terms, L)
    found = all_steps(problems, *point, num_terms).mean(dim=0)
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-10)


def test_the_variance_over_lengths_is_one_over_the_number_of_clients(point):
    """By enumeration, with 2 and 4 clients of two kinds on the same relays."""
    pair, variances = federated_quadratics(2), []
    for problems, order in ((pair, (1, 0)), (pair * 2, (1, 0, 3, 2))):
        lengths = itertools.product(range(2), repeat=len(problems))
        steps = [step_with(problems, *point, chosen, (order, order)) for chosen in lengths]
        variances.append(float(torch.stack(steps).var(dim=0, correction=0).sum()))
    assert variances[1] / variances[0] == pytest.approx(1 / 2, abs=1e-9)


def test_the_variance_over_all_draws_falls_as_one_over_the_number_of_clients(point):
    """Over 150 draws, for 2 and 8 clients of two kinds: the slope is -1 within 0.3."""
    pair, (x, y) = federated_quadratics(2), point
    algorithm = FedMBO(num_terms=2, smoothness=L, beta=STILL, alpha=1.0, num_inner_steps=1)
    variances = []
    for copies in (1, 4):
        draws = (State(q, {"x": x}, {"y": y}, {}, {"copies": 1}) for q in range(150))
        found = [one_round(algorithm, pair * copies, state).x["x"] for state in draws]
        variances.append(torch.stack(found).var(dim=0).sum())
    slope = (variances[1] / variances[0]).log2() / 2
    assert float(slope) == pytest.approx(-1, abs=0.3)


def test_lengths_and_relays_are_drawn_uniformly():
    algorithm, draws = FedMBO(num_terms=4), 2000
    lengths = Counter(algorithm.num_factors(q, 1) for q in range(draws))
    met = Counter(algorithm.relay(q, 0, [2, 5, 7])[1] for q in range(draws))
    for counts, number in ((lengths, 4), (met, 3)):
        assert len(counts) == number
        deviation = (draws * (1 / number) * (1 - 1 / number)) ** 0.5
        assert all(abs(c - draws / number) < 4 * deviation for c in counts.values())


def test_it_reaches_the_global_solution_where_chains_do_not_scatter():
    problems = calm_quadratics()
    clients = [rabo.Client(p) for p in problems]
    result = rabo.solve(
        clients, algorithm="fedmbo", rounds=60, alpha=0.3, num_terms=3, outer_step="descent"
    )
    assert distance(problems, result.x) < 1e-6


def test_with_one_client_it_is_its_centralised_form():
    [problem] = federated_quadratics(1)
    m, alpha, beta, T, N = problem.coefficients, 0.1, 0.1, 3, 5
    algorithm = FedMBO(
        alpha=alpha, beta=beta, num_inner_steps=T, num_terms=N, smoothness=L, momentum=0.5
    )
    state = algorithm.init(problem)
    x, y = state.x["x"], state.y["y"]
    for q in range(4):
        state = one_round(algorithm, [problem], state)
        velocity = torch.zeros_like(y)
        for _ in range(T):
            velocity = 0.5 * velocity + m.H @ y - m.B @ x - m.c
            y = y - beta * velocity
        p = N / L * (m.K @ y - m.t)
        for _ in range(algorithm.num_factors(q, 0)):
            p = p - m.H @ p / L
        x = x - alpha * (m.P @ x - m.s + m.B.T @ p)
    torch.testing.assert_close(state.x["x"], x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state.y["y"], y, rtol=1e-12, atol=1e-12)


def test_on_submodels_a_factor_changes_the_entries_its_client_holds():
    """Two clients, the second of half width; chains go to the other client and come back."""
    problems = federated_quadratics(2)
    algorithm = Chosen(
        lengths=(1, 1),
        orders=((1, 0), (0, 1)),
        policy=rabo.Static(),
        num_terms=2,
        smoothness=L,
        beta=STILL,
        alpha=1.0,
        num_inner_steps=1,
    )
    after = one_round(algorithm, problems, widths=[1.0, 0.5])
    x, y = (t for part in problems[0].start() for t in part.values())
    a, b = (p.coefficients for p in problems)
    p = 2 / L * (a.K @ y - a.t)
    p[:2] -= b.H[:2, :2] @ p[:2] / L
    wide = a.P @ x - a.s + a.B.T @ p
    p = torch.zeros(4, dtype=torch.float64)
    p[:2] = 2 / L * (b.K[:2, :2] @ y[:2] - b.t[:2])
    p = p - a.H @ p / L
    narrow = b.P[:2, :2] @ x[:2] - b.s[:2] + b.B[:2, :2].T @ p[:2]
    step = torch.cat([(wide[:2] + narrow) / 2, wide[2:]])
    torch.testing.assert_close(after.x["x"], x - step, rtol=1e-12, atol=1e-12)


def test_copies_of_y_stay_with_their_client_and_use_its_own_hessian():
    """With long inner runs and series: the mean of the local hypergradients at y_i*(x)."""
    problems = [curved_problem(seed, copies=3) for seed in (0, 1)]
    algorithm = FedMBO(alpha=1.0, num_inner_steps=300, num_terms=300)
    state = algorithm.init(problems[0])
    state = replace(state, y={k: 0 * v for k, v in state.y.items()})
    after = one_round(algorithm, problems, state)
    slopes = []
    for problem in problems:
        y = {"y": state.y["y"].expand(3, -1)}
        for _ in range(10):  # Newton's steps
            g = partial(_inner, problem, state.x)
            slope = torch.autograd.functional.jacobian(g, y["y"])
            hessian = torch.autograd.functional.hessian(g, y["y"]).reshape(12, 12)
            y = {"y": y["y"] - torch.linalg.solve(hessian, slope.flatten()).reshape(3, 4)}
        slopes.append(dense_hypergradient(problem, state.x, y, Batch(None, None)))
    truth = torch.stack(slopes).mean(dim=0)
    torch.testing.assert_close(state.x["x"] - after.x["x"], truth, rtol=1e-6, atol=1e-8)


def _inner(problem, x, y):
    return problem.inner(x, {"y": y}, None)
