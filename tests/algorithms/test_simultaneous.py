"""SimFBO, ShroFBO, FedBiO and FedBiOAcc: on quadratics a round is an affine map of all they carry.

Its fixed point is therefore known to rounding, for steps of any size, and rounds lead to it if and
only if the spectral radius of the map is below one.
"""

from dataclasses import replace

import pytest
import torch

import rabo
from known_problems import distance, federated_quadratics, one_round
from rabo.algorithms import FedBiO, FedBiOAcc, ShroFBO, SimFBO, State
from rabo.tasks.quadratic import ClosedForm
from rabo.tree import flatten, leaves, replace_leaves, unflatten

ALL = [SimFBO, ShroFBO, FedBiO, FedBiOAcc]
DIRECTIONS = ("x_direction", "y_direction", "v_direction")
UNEQUAL = tuple(range(1, 9))


def carried(state):
    return state.x, state.y, state.vectors


def fixed_point(algorithm, problems, round=0):
    """Return (x, y, vectors) that a round leaves where they are, and the map's spectral radius."""
    state = algorithm.init(problems[0])
    if isinstance(algorithm, FedBiOAcc):
        likes = zip(DIRECTIONS, (state.x, state.y, state.y), strict=True)
        state = replace(state, vectors={**state.vectors, **dict(likes)})
    like = carried(state)
    size = sum(t.numel() for t in leaves(like))

    def apply(z):
        x, y, vectors = replace_leaves(like, unflatten(z.reshape(1, -1), leaves(like)))
        after = one_round(algorithm, problems, State(round, x, y, vectors))
        return flatten(leaves(carried(after))).flatten()

    zero = torch.zeros(size, dtype=torch.float64)
    offset = apply(zero)
    eye = torch.eye(size, dtype=torch.float64)
    matrix = torch.stack([apply(e) - offset for e in eye], dim=1)
    point = torch.linalg.solve(eye - matrix, offset)
    radius = float(torch.linalg.eigvals(matrix).abs().max())
    return replace_leaves(like, unflatten(point.reshape(1, -1), leaves(like))), radius


def bias(algorithm, problems, round=0):
    (x, *_), radius = fixed_point(algorithm, problems, round)
    assert radius < 1
    return distance(problems, x)


@pytest.mark.parametrize("kind", ALL)
def test_with_one_local_step_the_global_solution_is_what_rounds_lead_to(kind):
    problems = federated_quadratics()
    (x, y, vectors), radius = fixed_point(
        kind(alpha=0.05, beta=0.2, num_local_steps=1), problems, round=3
    )
    truth = ClosedForm.of(problems)
    m = truth.mean
    v = torch.linalg.solve(m.H, m.K @ y["y"] - m.t)
    assert radius < 1
    assert distance(problems, x) < 1e-10
    torch.testing.assert_close(y["y"], truth.inner_solution(x["x"]), rtol=0, atol=1e-10)
    torch.testing.assert_close(vectors["v"]["y"], v, rtol=0, atol=1e-10)


@pytest.mark.parametrize("algorithm", ["fedbio", "fedbioacc"])
def test_rounds_reach_the_global_solution(algorithm):
    problems = federated_quadratics()
    clients = [rabo.Client(p) for p in problems]
    options = {"alpha": 0.1, "beta": 0.3, "num_local_steps": 1, "outer_step": "descent"}
    result = rabo.solve(clients, algorithm=algorithm, rounds=120, **options)
    assert distance(problems, result.x) < 1e-6


def test_under_unequal_local_steps_the_bias_of_simfbo_stays_and_that_of_shrofbo_vanishes():
    """τ_i = 1..8; the steps shrink tenfold, twice."""
    problems = federated_quadratics(8)
    found = {
        kind: [
            bias(kind(alpha=0.03 * s, beta=0.08 * s, num_local_steps=UNEQUAL), problems)
            for s in (1, 0.1, 0.01)
        ]
        for kind in (SimFBO, ShroFBO)
    }
    assert min(found[SimFBO]) > 0.2
    for before, after in zip(found[ShroFBO], found[ShroFBO][1:], strict=False):
        assert before / after == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize("kind", [FedBiO, FedBiOAcc])
def test_the_drift_of_several_local_steps_vanishes_with_their_size(kind):
    problems = federated_quadratics()
    found = [
        bias(kind(alpha=0.05 * s, beta=0.2 * s, num_local_steps=4), problems, round=3)
        for s in (0.1, 0.01)
    ]
    assert found[0] / found[1] == pytest.approx(10, rel=0.1)


def test_the_drift_of_fedbioacc_falls_as_its_steps_do():
    problems = federated_quadratics()
    algorithm = FedBiOAcc(alpha=0.005, beta=0.02, num_local_steps=4)
    early, late = (bias(algorithm, problems, round=q) for q in (0, 10**4))
    assert late < 0.5 * early


@pytest.mark.parametrize("kind", [SimFBO, ShroFBO, FedBiO])
def test_with_one_client_it_is_its_centralised_form(kind):
    """Descent on x, y and v at once."""
    [problem] = federated_quadratics(1)
    m, alpha, beta, tau = problem.coefficients, 0.05, 0.2, 3
    algorithm = kind(alpha=alpha, beta=beta, num_local_steps=tau)
    state = algorithm.init(problem)
    x, y, v = state.x["x"], state.y["y"], torch.zeros(4).double()
    for _ in range(4):
        state = one_round(algorithm, [problem], state)
        for _ in range(tau):
            x, y, v = (
                x - alpha * (m.P @ x - m.s + m.B.T @ v),
                y - beta * (m.H @ y - m.B @ x - m.c),
                v - beta * (m.H @ v - m.K @ y + m.t),
            )
    for found, truth in ((state.x["x"], x), (state.y["y"], y), (state.vectors["v"]["y"], v)):
        torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)


def test_with_one_client_fedbioacc_is_descent_along_directions_that_remember():
    """With noise: the same draw at both points of a step."""
    problem = replace(federated_quadratics(1)[0], sigma_f=0.5, sigma_g=0.5)
    m, alpha, beta, steps, h, c = problem.coefficients, 0.05, 0.2, 3, 10.0, 0.4
    algorithm = FedBiOAcc(alpha=alpha, beta=beta, num_local_steps=steps, horizon=h, forgetting=c)
    state = algorithm.init(problem)

    def slopes(z, q, purpose):
        x, y, v = z
        generator = rabo.seeding.stream(0, q, 0, "batch", purpose)
        batch = problem.batch(generator)
        return [
            m.P @ x - m.s + m.B.T @ v + batch.outer,
            m.H @ y - m.B @ x - m.c + batch.inner,
            m.H @ v - m.K @ y + m.t,
        ]

    z = [state.x["x"], state.y["y"], torch.zeros(4).double()]
    d = slopes(z, 0, "first")
    for q in range(3):
        state = one_round(algorithm, [problem], state)
        for k in range(steps):
            rate = (h / (h + q * steps + k)) ** (1 / 3)
            sizes = (rate * alpha, rate * beta, rate * beta)
            new = [a - s * b for a, s, b in zip(z, sizes, d, strict=True)]
            pairs = zip(slopes(new, q, k), d, slopes(z, q, k), strict=True)
            d = [here + (1 - c * rate**2) * (old - there) for here, old, there in pairs]
            z = new
    carried_directions = [next(iter(state.vectors[n].values())) for n in DIRECTIONS]
    found = [state.x["x"], state.y["y"], state.vectors["v"]["y"], *carried_directions]
    for a, b in zip(found, [*z, *d], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_v_is_projected_to_the_ball_of_radius_r():
    problems = federated_quadratics()
    free = one_round(SimFBO(alpha=0.05, beta=0.2), problems).vectors["v"]["y"]
    for radius, expected in ((0.1, 0.1 * free / free.norm()), (1e6, free)):
        after = one_round(SimFBO(alpha=0.05, beta=0.2, radius=radius), problems)
        torch.testing.assert_close(after.vectors["v"]["y"], expected)


def test_the_work_of_a_client_goes_with_its_own_number_of_steps():
    clients = [rabo.Client(p) for p in federated_quadratics(3)]
    result = rabo.solve(
        clients, algorithm="simfbo", rounds=1, beta=0.01, alpha=0.01, num_local_steps=(1, 2, 4)
    )
    work = [e.cost.multiply_adds for e in result.history[0].entries]
    assert work == [work[0], 2 * work[0], 4 * work[0]]
    assert result.relative_cost["multiply_adds"] == 1


@pytest.mark.parametrize("kind", ALL)
def test_x_waits_until_the_warm_up_is_over(kind):
    problems = federated_quadratics()
    algorithm = kind(alpha=0.05, beta=0.2, warm_up=1)
    start = algorithm.init(problems[0])
    first = one_round(algorithm, problems, start)
    assert torch.equal(first.x["x"], start.x["x"])
    assert not torch.equal(first.vectors["v"]["y"], start.vectors["v"]["y"])
    assert not torch.equal(one_round(algorithm, problems, first).x["x"], start.x["x"])


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (SimFBO, {"num_local_steps": ()}, "num_local_steps must be"),
        (SimFBO, {"num_local_steps": (3, 0)}, "num_local_steps must be"),
        (ShroFBO, {"num_local_steps": 0}, "num_local_steps must be"),
        (SimFBO, {"server_scale": 0.0}, "server_scale must be"),
        (SimFBO, {"radius": -1.0}, "radius must be"),
        (FedBiO, {"num_local_steps": 0}, "num_local_steps must be"),
        (FedBiOAcc, {"horizon": 0.0}, "horizon must be"),
        (FedBiOAcc, {"forgetting": 2.0}, "forgetting must"),
    ],
)
def test_impossible_options_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**options)
