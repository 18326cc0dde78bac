"""SimRABO and SimRAFBO against SimFBO, rounds written out and closed forms."""

from dataclasses import replace

import pytest
import torch

import rabo
from known_problems import distance, federated_quadratics, one_round
from rabo.algorithms import ALGORITHMS, RABO, Cohort, ShroFBO, SimFBO, State
from rabo.algorithms.simrabo import SimRABO, SimRAFBO
from rabo.errors import ClientError
from rabo.execution import InProcess
from rabo.federation.federation import Federation
from rabo.federation.ledger import Ledger
from rabo.pruning.policies import Full, Whole
from rabo.runs.checkpoint import Checkpoints
from rabo.seeding import stream
from rabo.tasks.quadratic import ClosedForm

F64 = {"dtype": torch.float64}
BOTH = [SimRABO, SimRAFBO]
STEPS = {"alpha": 0.05, "beta": 0.1}
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
DIFFERENCES = {"rtol": 1e-7, "atol": 1e-8}  # of gradients, in float64


def noisy(num_clients=3, sigma=0.2):
    problems = federated_quadratics(num_clients)
    return [replace(p, sigma_f=sigma, sigma_g=sigma) for p in problems]


def carried(state):
    return {"x": state.x["x"], "y": state.y["y"], "v": state.vectors["v"]["y"]}


def assert_close(found, truth, tolerance):
    for name, value in carried(truth).items():
        torch.testing.assert_close(carried(found)[name], value, **tolerance)


@pytest.mark.parametrize(("kind", "tolerance"), [(SimRABO, CLOSE), (SimRAFBO, DIFFERENCES)])
@pytest.mark.parametrize(
    ("other", "steps"), [(SimFBO, 1), (SimFBO, 4), (ShroFBO, 4), (ShroFBO, (1, 3, 2))]
)
def test_without_masks_extra_inner_steps_and_forgetting_it_is_simfbo_or_shrofbo(
    kind, tolerance, other, steps
):
    """On the same draws of noisy gradients, over four rounds; equal for SimFBO if all τ_i are."""
    problems, options = noisy(), {"num_local_steps": steps, **STEPS}
    algorithm = kind(num_inner_steps=1, forgetting=0.0, **options)
    found, truth = algorithm.init(problems[0]), other(**options).init(problems[0])
    for _ in range(4):
        found = one_round(algorithm, problems, found)
        truth = one_round(other(**options), problems, truth)
        assert_close(found, truth, tolerance)
    assert float(truth.vectors["v"]["y"].norm()) > 0.1


def test_unequal_steps_count_by_their_number_in_simfbo_alone():
    problems, options = noisy(), {"num_local_steps": (1, 3, 2), **STEPS}
    found = one_round(SimRABO(num_inner_steps=1, forgetting=0.0, **options), problems)
    other = one_round(SimFBO(**options), problems)
    assert not torch.allclose(found.x["x"], other.x["x"], rtol=1e-3)


@pytest.mark.parametrize("outer_step", [None, rabo.Adam()])
def test_rounds_on_submodels_are_those_written_out(outer_step):
    """Dense loops with masks: unequal τ_i, T = 2, a v that forgets; Adam's x on the server."""
    problems, widths, steps = federated_quadratics(), [0.5, 1.0, 0.5], (2, 1, 3)
    alpha, beta, T, forgetting = 0.05, 0.1, 2, 0.7
    more = {"outer_step": outer_step} if outer_step else {}
    algorithm = SimRABO(
        policy=rabo.Random(),
        num_local_steps=steps,
        num_inner_steps=T,
        forgetting=forgetting,
        max_outer_step=None,
        alpha=alpha,
        beta=beta,
        **more,
    )
    state = algorithm.init(problems[0])
    x, y, v = (t.clone() for t in carried(state).values())
    parameter = torch.nn.Parameter(x.clone())
    adam = torch.optim.Adam([parameter], lr=alpha)
    for q in range(3):
        state = one_round(algorithm, problems, state, widths)
        sums = [torch.zeros_like(t) for t in (x, y, v)]
        counts = [torch.zeros_like(t) for t in (x, y, v)]
        for i, (problem, width, tau) in enumerate(zip(problems, widths, steps, strict=True)):
            whole = Whole(problem.channels, {"x": x}, {"y": y})
            part = rabo.Random()(whole, width, i, q, stream(0, q, i, "mask"))
            mx, my = part.x.held()["x"].double(), part.y.held()["y"].double()
            m, xi, yi, vi, slopes = problem.coefficients, x * mx, y * my, v * my, 0.0
            for _ in range(tau):
                slope = (m.P @ xi - m.s + m.B.T @ vi) * mx
                residual = (m.H @ vi - (m.K @ yi - m.t)) * my
                for _ in range(T):
                    yi = yi - beta * (m.H @ yi - m.B @ xi - m.c) * my
                vi, xi, slopes = vi - beta * residual, xi - alpha * slope, slopes + slope
            for total, change in zip(sums, (slopes, y * my - yi, v * my - vi), strict=True):
                total += change / tau
            for count, mask in zip(counts, (mx, my, my), strict=True):
                count += mask
        scale = sum(steps) / len(steps)
        dx, dy, dv = (s / c.clamp(min=1) for s, c in zip(sums, counts, strict=True))
        before = x
        if outer_step:
            assert bool((counts[0] > 0).all())  # torch's Adam knows of no masks
            parameter.grad = dx
            adam.step()
            x = parameter.detach().clone()
        else:
            x = x - alpha * scale * dx
        kept = 1 / (1 + forgetting * (x - before).norm() / x.norm())
        y, v = y - scale * dy, kept * v - scale * dv
        assert_close(
            state, State(q + 1, {"x": x}, {"y": y}, {"v": {"y": v}}), {"rtol": 1e-9, "atol": 1e-12}
        )


@pytest.mark.parametrize("kind", BOTH)
def test_an_entry_that_no_client_holds_keeps_its_bits(kind):
    problems = federated_quadratics()
    algorithm = kind(policy=rabo.Static(), num_local_steps=2)
    start = algorithm.init(problems[0])
    state = start
    for _ in range(3):
        state = one_round(algorithm, problems, state, [0.5] * 3)
    for name, held in (("x", 2), ("y", 2), ("v", 2)):  # of 3, 4 and 4
        moved = carried(state)[name] != carried(start)[name]
        assert moved.tolist() == [k < held for k in range(len(moved))], name


@pytest.mark.parametrize("options", [{}, {"num_local_steps": 3, "policy": rabo.Random()}])
def test_differences_of_gradients_give_the_rounds_of_second_derivatives(options):
    problems = federated_quadratics()
    states = [kind(**STEPS, **options).init(problems[0]) for kind in BOTH]
    for _ in range(4):
        states = [
            one_round(kind(**STEPS, **options), problems, state, [1.0, 0.5, 0.7])
            for kind, state in zip(BOTH, states, strict=True)
        ]
    assert_close(*states, DIFFERENCES)


class Cubed(torch.autograd.Function):
    """y³ that refuses a backward pass from which another one could start."""

    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        return y**3

    @staticmethod
    def backward(ctx, slope):
        if torch.is_grad_enabled():
            raise ArithmeticError("a second derivative")
        return 3 * ctx.saved_tensors[0] ** 2 * slope


def cubic(cube):
    """g = Σ y³/3 − xᵀy, so that y* = √x; f = ½‖y − 1‖²."""
    x = torch.tensor([4.0, 9.0], **F64)
    problem = rabo.Problem(
        inner=lambda x, y, data: cube(y["y"]).sum() / 3 - (x["x"] * y["y"]).sum(),
        outer=lambda x, y, data: (y["y"] - 1).square().sum() / 2,
        x={"x": x},
        y={"y": x / 2},
    )
    return [rabo.Client(problem.on(inner=None, outer=None))]


def test_simrafbo_takes_no_second_derivative():
    options = {"rounds": 5, "alpha": 0.1}
    with pytest.raises(ClientError, match="a second derivative"):
        rabo.solve(cubic(Cubed.apply), algorithm="simrabo", **options)
    found = rabo.solve(cubic(Cubed.apply), algorithm="simrafbo", **options)
    truth = rabo.solve(cubic(lambda y: y**3), algorithm="simrabo", **options)
    assert not torch.equal(truth.x["x"], torch.tensor([4.0, 9.0], **F64))
    assert_close(found.state, truth.state, DIFFERENCES)


@pytest.mark.parametrize("kind", BOTH)
def test_it_reaches_the_solution_of_unlike_clients_where_local_hessians_do_not(kind):
    problems = federated_quadratics()
    clients, options = [rabo.Client(p) for p in problems], {"num_inner_steps": 1, "alpha": 0.1}
    result = rabo.solve(clients, algorithm=kind(**options), rounds=120)
    truth = ClosedForm.of(problems)
    x, y = result.x["x"], result.y["y"]
    assert distance(problems, result.x) < 1e-6
    torch.testing.assert_close(y, truth.inner_solution(x), rtol=0, atol=1e-6)
    v = torch.linalg.solve(truth.mean.H, truth.mean.K @ y - truth.mean.t)
    torch.testing.assert_close(result.state.vectors["v"]["y"], v, rtol=0, atol=1e-5)
    local = rabo.solve(clients, algorithm=RABO(**options), rounds=120)
    assert distance(problems, local.x) > 1e-2


class Spy(InProcess):
    """Counts the exchanges of every kind of work."""

    def __init__(self, problems):
        super().__init__(problems)
        self.works = []

    def map(self, work, requests):
        self.works.append(work.name)
        yield from super().map(work, requests)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("num_local_steps", [1, 3])
def test_a_round_is_one_exchange(kind, num_local_steps):
    problems = dict(enumerate(noisy()))
    spy = Spy(problems)
    algorithm = kind(num_local_steps=num_local_steps, warm_up=1)
    federation = Federation([rabo.Client(p) for p in problems.values()], algorithm, runtime=spy)
    list(federation.run(4))
    calibrations = spy.works.count("measure_curvature")
    assert calibrations == 1
    assert len(spy.works) - calibrations == 4


def fixed_point(algorithm, problems):
    """Return the x that a round leaves where it is; a round is affine if nothing is forgotten."""
    state = algorithm.init(problems[0])
    sizes = [len(t) for t in carried(state).values()]

    def apply(z):
        x, y, v = z.split(sizes)
        after = one_round(algorithm, problems, State(0, {"x": x}, {"y": y}, {"v": {"y": v}}))
        return torch.cat(list(carried(after).values()))

    eye = torch.eye(sum(sizes), **F64)
    offset = apply(0 * eye[0])
    matrix = torch.stack([apply(e) - offset for e in eye], dim=1)
    assert float(torch.linalg.eigvals(matrix).abs().max()) < 1
    return {"x": torch.linalg.solve(eye - matrix, offset)[: sizes[0]]}


@pytest.mark.parametrize("kind", BOTH)
def test_the_numbers_of_local_steps_leave_no_bias_but_that_of_their_size(kind):
    """τ_i = 1, 2, 4, 8: the distance to the solution falls as the steps do."""
    problems = federated_quadratics(4)
    found = [
        distance(
            problems,
            fixed_point(
                kind(
                    alpha=0.03 * s,
                    beta=0.08 * s,
                    num_local_steps=(1, 2, 4, 8),
                    num_inner_steps=1,
                    forgetting=0.0,
                ),
                problems,
            ),
        )
        for s in (0.1, 0.01)
    ]
    assert found[0] / found[1] == pytest.approx(10, rel=0.1)
    assert found[1] < 0.01


def test_the_variance_of_a_step_falls_as_one_over_the_number_of_clients():
    """Over 60 draws, for 2 and 8 clients of two kinds: the slope is -1 within 0.35."""
    pair, variances = noisy(2, sigma=1.0), []
    algorithm = SimRABO(alpha=0.1, beta=0.1, num_local_steps=2, num_inner_steps=2)
    start = one_round(algorithm, pair)
    for copies in (1, 4):
        states = (replace(start, round=q) for q in range(60))
        after = [carried(one_round(algorithm, pair * copies, state)) for state in states]
        variances.append(
            {name: torch.stack([a[name] for a in after]).var(dim=0).sum() for name in after[0]}
        )
    for name in variances[0]:
        slope = (variances[1][name] / variances[0][name]).log2() / 2
        assert float(slope) == pytest.approx(-1, abs=0.35), name


def test_v_forgets_in_proportion_to_the_relative_step_of_x():
    """One client, v = H⁻¹∇_y f and y = y*: nothing else moves v."""
    [problem] = federated_quadratics(1)
    m, x = problem.coefficients, torch.tensor([1.0, -2.0, 0.5], **F64)
    y = torch.linalg.solve(m.H, m.B @ x + m.c)
    v = torch.linalg.solve(m.H, m.K @ y - m.t)
    state = State(0, {"x": x}, {"y": y}, {"v": {"y": v}})
    for alpha, forgetting in ((0.1, 3.0), (0.01, 3.0), (0.1, 0.0)):
        algorithm = SimRABO(alpha=alpha, beta=0.1, forgetting=forgetting)
        after = one_round(algorithm, [problem], state)
        step = alpha * (m.P @ x - m.s + m.B.T @ v)
        kept = 1 / (1 + forgetting * step.norm() / (x - step).norm())
        torch.testing.assert_close(after.x["x"], x - step, **CLOSE)
        torch.testing.assert_close(after.vectors["v"]["y"], kept * v, rtol=1e-10, atol=1e-10)


def test_until_the_warm_up_is_over_y_and_v_move_where_x_is_and_nothing_is_forgotten():
    """As with steps on x that are too small for any number to tell."""
    problems, still = federated_quadratics(), {**STEPS, "alpha": 1e-300}
    states = []
    for options in ({"warm_up": 2, "forgetting": 5.0, **STEPS}, {"forgetting": 0.0, **still}):
        algorithm = SimRABO(num_local_steps=2, **options)
        state = algorithm.init(problems[0])
        for _ in range(2):
            state = one_round(algorithm, problems, state)
        states.append(state)
    assert torch.equal(states[0].x["x"], problems[0].start()[0]["x"])
    assert_close(*states, CLOSE)
    after = one_round(SimRABO(warm_up=2, **STEPS), problems, states[0])
    assert not torch.equal(after.x["x"], states[0].x["x"])


def test_a_client_that_does_not_answer_leaves_the_scale_to_those_who_do():
    """With clients of one kind, only the numbers of steps tell who was missing."""
    [problem] = federated_quadratics(1)
    options = {"num_inner_steps": 1, "forgetting": 0.0, **STEPS}
    algorithm = SimRABO(num_local_steps=(1, 4), **options)

    class Deserted(InProcess):
        def map(self, work, requests):
            yield from super().map(work, (r for r in requests if r.client == 0))

    state = algorithm.init(problem)
    ledger = Ledger(Deserted({0: problem, 1: problem}))
    ledger.begin(state.x, state.y)
    found = algorithm.round(state, Cohort(problem.channels, {0: 1.0, 1: 1.0}), ledger)
    alone = one_round(SimRABO(num_local_steps=1, **options), [problem])
    assert_close(found, alone, CLOSE)


@pytest.mark.parametrize("name", ["simrabo", "simrafbo"])
@pytest.mark.parametrize("step", ["descent", "adam"])
def test_a_run_goes_on_from_a_file_to_the_same_bits_and_limits(name, step, tmp_path):
    """Also with steps on x that are limited by those before the pause."""
    sizes = [1e-3] * 6 + [0.1] * 4

    def begun():
        problems = noisy()
        clients = [rabo.Client(p, c) for p, c in zip(problems, (1.0, 0.5, 0.7), strict=True)]
        algorithm = ALGORITHMS[name](
            alpha=lambda q: sizes[q],
            outer_step={"descent": rabo.algorithms.Descent(), "adam": rabo.Adam()}[step],
            policy=rabo.Random(),
            num_local_steps=(1, 2),
        )
        return Federation(clients, algorithm, participation=0.7)

    whole, before, after = begun(), begun(), begun()
    history = list(whole.run(10))
    list(before.run(6))
    Checkpoints(tmp_path, {}, every=1).add(before.snapshot())
    after.restore(Checkpoints(tmp_path, {}).latest(after.state, pytest.fail))
    again = list(after.run(4))
    assert history[6].metrics["limited_steps"] == 1
    assert [done.metrics for done in again] == [done.metrics for done in history[6:]]
    assert after.state.scalars == whole.state.scalars
    assert after.state.vectors.keys() == whole.state.vectors.keys()
    for tree, truth in ((after.state.x, whole.state.x), (after.state.y, whole.state.y)):
        assert all(torch.equal(tree[key], value) for key, value in truth.items())
    for vector, truth in whole.state.vectors.items():
        assert all(torch.equal(after.state.vectors[vector][k], t) for k, t in truth.items())


def test_full_width_and_no_policy_are_the_same_bits():
    problems = noisy()
    states = [one_round(SimRABO(policy=policy), problems) for policy in (Full(), rabo.Random())]
    assert all(torch.equal(carried(states[0])[n], t) for n, t in carried(states[1]).items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_local_steps": 0}, "num_local_steps"),
        ({"num_local_steps": ()}, "num_local_steps"),
        ({"num_local_steps": (2, 0)}, "num_local_steps"),
        ({"num_inner_steps": 0}, "num_inner_steps"),
        ({"forgetting": -0.1}, "forgetting"),
        ({"forgetting": float("nan")}, "forgetting"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SimRABO(**options)
