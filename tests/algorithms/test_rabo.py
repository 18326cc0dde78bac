"""RABO and RAFBO against closed forms."""

import warnings

import pytest
import torch

import rabo
from rabo.algorithms import Adam, Cohort
from rabo.exchange.cost import Meter
from rabo.exchange.work import perform
from rabo.execution import InProcess
from rabo.federation.ledger import Ledger
from rabo.pruning.policies import Full, Whole
from rabo.seeding import stream
from rabo.tasks import TASKS
from rabo.tasks.quadratic import ClosedForm, random_quadratic


def quadratics(num_clients=4, heterogeneity=1.0, **kwargs):
    family = random_quadratic(stream(0, "family"), 6, 5, heterogeneity=heterogeneity)
    return [family.client(stream(0, i), **kwargs) for i in range(num_clients)]


def solve(problems, capacities=None, **options):
    capacities = capacities or [1.0] * len(problems)
    clients = [rabo.Client(p, c) for p, c in zip(problems, capacities, strict=True)]
    options = {"num_inner_steps": 1, "alpha": 0.1, "outer_step": "descent", **options}
    return rabo.solve(clients, **options)


LONG = {
    "rabo": rabo.ConjugateGradient(num_iterations=12),
    "rafbo": rabo.DirectionalDifference(num_iterations=12),
}


@pytest.mark.parametrize("algorithm", ["rabo", "rafbo"])
def test_full_capacity_reaches_the_closed_form_solution(algorithm):
    problems = quadratics()
    truth = ClosedForm.of(problems)
    result = solve(
        problems, algorithm=algorithm, rounds=250, hessian="global", hypergradient=LONG[algorithm]
    )
    x = result.x["x"]
    assert float((x - truth.solution).norm() / truth.solution.norm()) < 1e-6
    assert float((result.y["y"] - truth.inner_solution(x)).norm()) < 1e-6


def test_local_hessians_leave_a_bias_that_heterogeneity_causes():
    """Erratum 6: the mean of local hypergradients is not ∇Φ when clients differ."""
    bias = []
    for heterogeneity in (0.0, 0.3, 1.0):
        problems = quadratics(heterogeneity=heterogeneity)
        truth = ClosedForm.of(problems)
        x = solve(problems, rounds=250, hypergradient=LONG["rabo"]).x["x"]
        bias.append(float((x - truth.solution).norm() / truth.solution.norm()))
    assert bias[0] < 1e-6
    assert 1e-3 < bias[1] < bias[2]


def test_the_printed_sign_of_line_10_would_step_uphill():
    """Erratum 1: our update moves y towards y*, its negative away from it."""
    problems = quadratics(1)
    truth = ClosedForm.of(problems)
    x, y = problems[0].start()
    target = truth.inner_solution(x["x"])
    result = solve(problems, rounds=1, alpha=1e-12)
    step = result.y["y"] - y["y"]
    assert (
        (y["y"] + step - target).norm() < (y["y"] - target).norm() < (y["y"] - step - target).norm()
    )


def test_an_entry_nobody_trained_stays_bit_for_bit():
    problems = quadratics()
    result = solve(problems, [0.5] * 4, rounds=3, policy=rabo.Static())
    x, y = problems[0].start()
    assert torch.equal(result.x["x"][3:], x["x"][3:])
    assert torch.equal(result.y["y"][3:], y["y"][3:])
    assert not (result.x["x"][:3] == x["x"][:3]).any()
    assert result.coverage == {"x_min": 4, "y_min": 4, "x_trained": 0.5, "y_trained": 0.6}


def test_capacity_1_equals_no_masks_bit_for_bit():
    problems = quadratics()
    a = solve(problems, rounds=5, policy=rabo.Importance())
    b = solve(problems, rounds=5, policy=Full())
    assert torch.equal(a.x["x"], b.x["x"])
    assert torch.equal(a.y["y"], b.y["y"])


@pytest.mark.parametrize("outer_steps", [1, 3])
def test_a_round_equals_algorithm_1_written_out(outer_steps):
    """One round with masks, T steps and local Hessians, as plain dense loops.

    With more outer steps, x moves on the client and y follows it, before x is averaged.
    """
    problems = quadratics(3)
    alpha, beta, steps = 0.05, 0.02, 3
    result = solve(
        problems,
        [0.5, 1.0, 0.5],
        rounds=1,
        alpha=alpha,
        beta=beta,
        num_inner_steps=steps,
        num_outer_steps=outer_steps,
        policy=rabo.Random(),
        hypergradient=rabo.ConjugateGradient(num_iterations=20),
    )
    x, y = (t.clone() for p in problems[0].start() for t in p.values())
    masks = []
    for i, width in enumerate([0.5, 1.0, 0.5]):
        whole = Whole(problems[i].channels, {"x": x}, {"y": y})
        parts = rabo.Random()(whole, width, i, 0, stream(0, 0, i, "mask"))
        masks.append(
            tuple(
                p.held()[n].double().expand_as(full)
                for p, n, full in ((parts.x, "x", x), (parts.y, "y", y))
            )
        )
    G, H = [], []
    for p, (mx, my) in zip(problems, masks, strict=True):
        m, u, v = p.coefficients, x * mx, y * my
        for _ in range(steps):
            v = v - beta * (m.H @ v - m.B @ u - m.c) * my
        G.append((y * my - v) / beta)
    cy = sum(my for _, my in masks)
    y_next = y - beta * sum(G) / cy.clamp(min=1)
    for p, (mx, my) in zip(problems, masks, strict=True):
        m, u, v = p.coefficients, x * mx, y_next * my
        held, total = my.bool(), torch.zeros_like(x)
        for k in range(outer_steps):
            for _ in range(steps if k else 0):
                v = v - beta * (m.H @ v - m.B @ u - m.c) * my
            w = torch.zeros_like(v)
            w[held] = torch.linalg.solve(m.H[held][:, held], (m.K @ v - m.t)[held])
            slope = (m.P @ u - m.s + m.B.T @ w) * mx
            total, u = total + slope, u - alpha * slope
        H.append(total)
    cx = sum(mx for mx, _ in masks)
    x_next = x - alpha * sum(H) / cx.clamp(min=1)
    torch.testing.assert_close(result.y["y"], y_next, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(result.x["x"], x_next, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("algorithm", ["rabo", "rafbo"])
def test_two_outer_steps_of_one_client_are_two_rounds(algorithm):
    """x is there already; y on the server is one round behind."""
    options = {"algorithm": algorithm, "beta": 0.02, "num_inner_steps": 3}
    two = solve(quadratics(1), rounds=1, num_outer_steps=2, **options)
    one, both = (solve(quadratics(1), rounds=rounds, **options) for rounds in (1, 2))
    torch.testing.assert_close(two.x["x"], both.x["x"], rtol=1e-12, atol=1e-12)
    assert torch.equal(two.y["y"], one.y["y"])


def test_outer_steps_with_a_y_per_task_are_those_written_out():
    """Every copy of y starts from the same y, and follows x by T steps before each slope."""
    task = TASKS["few-shot"](backbone="conv4", channels="4", tasks=2, queries=2, test_tasks=2)
    problem = task.build([1.0], 1, 0, "cpu").clients[0].problem
    alpha, beta, steps = 0.3, 0.5, 2
    options = {"alpha": alpha, "beta": beta, "num_inner_steps": steps, "num_outer_steps": 3}
    result = rabo.solve([rabo.Client(problem)], rounds=1, **options)
    batch = problem.batch(stream(0, 0, 0, "batch", "round"))
    x, y = problem.start()
    start = {k: v.clone() for k, v in x.items()}
    y = {k: v.unsqueeze(0).repeat(2, *[1] * v.dim()) for k, v in y.items()}
    for _ in range(3):
        z = problem.features(x, batch.inner)
        for _ in range(steps):
            y = {k: v.detach().requires_grad_() for k, v in y.items()}
            slopes = torch.autograd.grad(problem.inner(z.detach(), y, batch.inner), [*y.values()])
            y = {k: v - beta * s for (k, v), s in zip(y.items(), slopes, strict=True)}
        slope = rabo.ConjugateGradient()(problem, x, y, batch).value
        x = {k: (v - alpha * slope[k]).detach() for k, v in x.items()}
    for name, value in x.items():
        assert not torch.equal(value, start[name])
        torch.testing.assert_close(result.x[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("redraw", "more"), [("step", 2 * (4 + 1)), ("round", 0)])
def test_outer_steps_see_new_data_where_every_step_does(redraw, more):
    """Two more outer steps: T + 1 = 5 draws for each."""

    def loss(x, y, data):
        return (x["x"] - y["y"]).square().sum() + y["y"].square().sum()

    def num_drawn(outer_steps):
        drawn = set()

        def sample(data, generator):
            drawn.add(int(torch.randint(10**9, (), generator=generator)))
            return data

        start = {"x": {"x": torch.ones(2)}, "y": {"y": torch.ones(2)}}
        problem = rabo.Problem(inner=loss, outer=loss, **start, sample=sample, redraw=redraw)
        client = rabo.Client(problem.on(inner=torch.ones(1), outer=torch.ones(1)))
        steps = {"num_inner_steps": 4, "num_outer_steps": outer_steps}
        rabo.solve([client], rounds=1, beta=0.1, alpha=0.1, **steps)
        return len(drawn)

    assert num_drawn(3) - num_drawn(1) == more


class Shuffled(InProcess):
    """Runs clients in another order and answers in the order it promises."""

    def map(self, work, requests):
        shuffled = list(requests)[::-1]
        replies = [perform(work, r, self.context(r), Meter()) for r in shuffled]
        yield from replies[::-1]


@pytest.mark.parametrize("hessian", ["local", "global"])
def test_the_order_in_which_clients_run_does_not_change_a_bit(hessian):
    problems = quadratics(sigma_f=0.1, sigma_g=0.1)
    clients = [rabo.Client(p, c) for p, c in zip(problems, [1, 0.5, 0.3, 1], strict=True)]
    results = [
        rabo.solve(clients, rounds=4, hessian=hessian, policy=rabo.Random(), runtime=runtime)
        for runtime in (None, Shuffled(dict(enumerate(problems))))
    ]
    assert torch.equal(results[0].x["x"], results[1].x["x"])
    assert torch.equal(results[0].y["y"], results[1].y["y"])


def test_a_seed_fixes_every_draw():
    def run(seed):
        problems = quadratics(sigma_f=0.1, sigma_g=0.1)
        return solve(problems, rounds=3, seed=seed, participation=0.5).x["x"]

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))


class Deserted(InProcess):
    """Client 2 never answers the second exchange."""

    def map(self, work, requests):
        for reply in super().map(work, requests):
            if not (reply.client == 2 and work.name in ("estimate_outer", "hessian_product")):
                yield reply


@pytest.mark.parametrize("hessian", ["local", "global"])
def test_a_round_goes_on_with_those_who_answered(hessian):
    problems = quadratics()
    clients = [rabo.Client(p) for p in problems]
    runtime = Deserted(dict(enumerate(problems)))
    result = rabo.solve(clients, rounds=2, hessian=hessian, runtime=runtime)
    assert result.coverage["x_min"] == 3
    assert result.coverage["y_min"] == 4


def test_auto_beta_is_half_the_inverse_of_the_largest_curvature():
    problems = quadratics()
    largest = max(float(torch.linalg.eigvalsh(p.coefficients.H)[-1]) for p in problems)
    state = solve(problems, rounds=1).state
    assert state.scalars["beta"] == pytest.approx(1 / (2 * largest), rel=1e-6)


def test_a_step_size_that_cannot_work_is_warned_about_with_the_number():
    problems = quadratics()
    largest = max(float(torch.linalg.eigvalsh(p.coefficients.H)[-1]) for p in problems)
    with pytest.warns(rabo.StepSizeWarning, match=f"{2 / largest:g}"):
        solve(problems, rounds=1, beta=3 / largest)
    with warnings.catch_warnings():
        warnings.simplefilter("error", rabo.StepSizeWarning)
        solve(problems, rounds=1, beta=1.9 / largest)


def test_global_hessian_with_masks_solves_the_sum_of_the_masked_systems():
    """At convergence of CG, v solves Σ M_iᵀH_iM_i v = Σ M_iᵀ∇_y f_i."""
    problems = quadratics(3)
    algorithm = rabo.RABO(
        hessian="global", policy=rabo.Static(), hypergradient=LONG["rabo"], alpha=1.0, beta=1e-12
    )
    state = algorithm.init(problems[0])
    cohort = Cohort(problems[0].channels, {0: 1.0, 1: 0.5, 2: 0.5})
    ledger = Ledger(InProcess(dict(enumerate(problems))))
    ledger.begin(state.x, state.y)
    after = algorithm.round(state, cohort, ledger)
    keep = [(torch.arange(6), torch.arange(5))] + [(torch.arange(3), torch.arange(3))] * 2
    A, b = torch.zeros(5, 5).double(), torch.zeros(5).double()
    for p, (_, j) in zip(problems, keep, strict=True):
        m = p.coefficients
        A[: len(j), : len(j)] += m.H[j][:, j]
        b[: len(j)] += m.K[j][:, j] @ state.y["y"][j] - m.t[j]
    v = torch.linalg.solve(A, b)
    total, count = torch.zeros(6).double(), torch.zeros(6).double()
    for p, (i, j) in zip(problems, keep, strict=True):
        m = p.coefficients
        total[: len(i)] += m.P[i][:, i] @ state.x["x"][i] - m.s[i] + m.B[j][:, i].T @ v[j]
        count[: len(i)] += 1
    torch.testing.assert_close(after.x["x"], state.x["x"] - total / count, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(
    ("estimator", "products"),
    [
        (rabo.ConjugateGradient(num_iterations=3), 3),
        (rabo.Neumann(num_terms=3, step_size=0.1), 3),
        (rabo.DirectionalDifference(num_iterations=2), 2),
    ],
)
def test_a_global_solve_asks_once_for_each_product(estimator, products):
    problems = quadratics()
    result = solve(problems, rounds=2, hessian="global", hypergradient=estimator, warm_up=1)
    asked = [sum(entry.client == 0 for entry in done.entries) for done in result.history]
    assert asked == [1, 3 + products]  # the first round is a warm-up


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -1.0}, "alpha must be a positive number"),
        ({"alpha": float("nan")}, "alpha must be a positive number"),
        ({"beta": -0.1}, "beta must be a positive number"),
        ({"num_inner_steps": 0}, "num_inner_steps must be"),
        ({"hessian": "both"}, "hessian must be"),
        ({"num_outer_steps": 0}, "num_outer_steps must be"),
        ({"num_outer_steps": 2, "hessian": "global"}, "use hessian='local'"),
        ({"num_outer_steps": 2, "outer_step": Adam()}, "use outer_step='descent'"),
        ({"hessian": "global", "hypergradient": rabo.Unrolled()}, "needs an estimator"),
        ({"calibrate_every": 0}, "calibrate_every must be"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        rabo.RABO(**options)
