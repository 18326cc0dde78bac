"""The numbers of `rabo.check` against closed forms."""

import pytest
import torch
from torch import nn

import rabo
from known_problems import curved_problem, episodic_problem, federated_quadratics, truncated_series
from rabo.tasks.quadratic import ClosedForm


def clients_of(problems):
    return [rabo.Client(problem) for problem in problems]


def cosine_and_length(a, b):
    return float(a @ b / a.norm() / b.norm()), float(a.norm() / b.norm())


@pytest.fixture(scope="module")
def unlike():
    """Two clients that differ in every matrix, the check of them, and the point it was made at."""
    problems = federated_quadratics(2, condition=8.0)
    form = ClosedForm.of(problems)
    x = problems[0].start()[0]["x"]
    return problems, rabo.check(clients_of(problems)), form, x, form.inner_solution(x)


def test_the_bias_of_local_hessians_is_that_of_the_closed_form(unlike):
    problems, found, form, x, y = unlike
    each = [p.coefficients for p in problems]
    local = sum(m.P @ x - m.s + m.B.T @ torch.linalg.solve(m.H, m.K @ y - m.t) for m in each) / 2
    truth = form.hypergradient(x)
    assert found.local[1:] == pytest.approx(cosine_and_length(local, truth), rel=1e-6)
    assert found.local.error == pytest.approx(float((local - truth).norm() / truth.norm()))
    direct = form.mean.P @ x - form.mean.s
    assert found.direct[1:] == pytest.approx(cosine_and_length(direct, truth), rel=1e-6)


def test_the_spectra_and_beta_are_those_of_dense_eigenvalues(unlike):
    problems, found, *_ = unlike
    values = [torch.linalg.eigvalsh(p.coefficients.H) for p in problems]
    assert [s.largest for s in found.spectra] == pytest.approx([float(v[-1]) for v in values])
    assert [s.smallest for s in found.spectra] == pytest.approx([float(v[0]) for v in values])
    assert found.beta == pytest.approx(1 / (2 * max(float(v[-1]) for v in values)))
    assert found.is_convex


def test_the_error_of_a_truncated_series_is_that_of_the_dense_series(unlike):
    _, found, form, x, y = unlike
    L = float(torch.linalg.eigvalsh(form.mean.H)[-1])
    truth = form.hypergradient(x)
    series = truncated_series(form.mean, x, y, 10, L)
    error = float((series - truth).norm() / truth.norm())
    assert error > 1e-4
    assert found.estimators["neumann"].error == pytest.approx(error, rel=1e-3)
    assert found.estimators["conjugate-gradient"].error < 1e-6
    assert found.hypergradient_gap < 1e-6


def test_equal_clients_have_no_bias_and_the_options_found_start_a_run():
    problems = federated_quadratics(1) * 3
    found = rabo.check(clients_of(problems))
    assert found.local[1:] == pytest.approx((1.0, 1.0))
    assert found.passed
    assert not found.warnings
    assert found.options["algorithm"] == "rabo"
    result = rabo.solve(clients_of(problems), **found.options, rounds=2)
    assert len(result.history) == 2


def scaled_client(h, b):
    """g = Σ h y²/2 − b x y and f = Σ (y − 1)²/2, from zero."""

    def inner(x, y, data):
        return (h * y["y"].square()).sum() / 2 - y["y"] @ (b * x["x"])

    def outer(x, y, data):
        return (y["y"] - 1).square().sum() / 2

    start = torch.zeros(2, dtype=torch.float64)
    problem = rabo.Problem(inner=inner, outer=outer, x={"x": start}, y={"y": start})
    return rabo.Client(problem.on(inner=None, outer=None))


def test_clients_that_differ_are_sent_to_a_method_without_local_inverses():
    h = torch.tensor([[1.0, 9.0], [9.0, 1.0]], dtype=torch.float64)
    b = torch.tensor([[5.0, 1.0], [-20.0, 5.0]], dtype=torch.float64)
    clients = [scaled_client(*each) for each in zip(h, b, strict=True)]
    found = rabo.check(clients)
    # at x = 0: y* = 0 and ∇f = −1, so that ∇Φ = −mean b / mean h, and locally −mean (b / h)
    truth, local = -b.mean(dim=0) / h.mean(dim=0), -(b / h).mean(dim=0)
    assert found.local[1:] == pytest.approx(cosine_and_length(local, truth))
    assert found.local.cosine < 0.5
    assert found["local / global"].verdict == "warning"
    assert found.options["algorithm"] == "simrabo"
    assert rabo.solve(clients, **found.options, rounds=2).history


def test_a_problem_that_is_not_quadratic_agrees_with_differences_of_phi():
    problem = curved_problem(seed=1)
    found = rabo.check([rabo.Client(problem)])
    assert found.hypergradient_gap < 1e-6
    assert found.estimators["conjugate-gradient"].error < 1e-6
    assert found.local is None


def large_client(dtype=torch.float64):
    """1,200 decoupled entries of y with curvatures 1 to 30, and x that shifts a third each."""
    h = torch.linspace(1, 30, 1200, dtype=dtype)
    B = torch.eye(3, dtype=dtype).repeat_interleave(400, dim=0)

    def inner(x, y, data):
        return (h * y["y"].square()).sum() / 2 - y["y"] @ (B @ x["x"])

    def outer(x, y, data):
        return (y["y"] - data).square().sum() / 2

    t = torch.linspace(-1, 2, 1200, dtype=dtype)
    problem = rabo.Problem(
        inner=inner, outer=outer, x={"x": torch.ones(3, dtype=dtype)}, y={"y": torch.zeros_like(t)}
    )
    return rabo.Client(problem.on(inner=None, outer=t)), h, B, t


def test_a_large_y_is_held_against_differences_of_phi_and_gives_the_same_errors():
    client, h, B, t = large_client()
    found = rabo.check([client])
    assert not found.spectra[0].is_exact
    assert found.spectra[0].largest == pytest.approx(30, rel=0.01)
    slope = (B @ torch.ones(3, dtype=torch.float64)) / h - t
    truth, term, series = B.T @ (slope / h), slope, torch.zeros_like(slope)
    for _ in range(10):
        series, term = series + term / 30, term - h * term / 30
    error = float((B.T @ series - truth).norm() / truth.norm())
    assert found.estimators["neumann"].error == pytest.approx(error, rel=0.01)
    assert found.hypergradient_gap < 1e-5


def test_constants_in_single_precision_keep_the_whole_check_in_it():
    found = rabo.check([large_client(torch.float32)[0]])
    assert found.precision == "float32"
    assert found.passed
    assert found.hypergradient_gap < 0.05


def test_tasks_with_their_own_y_are_solved_apart():
    found = rabo.check([rabo.Client(episodic_problem(seed)) for seed in range(2)])
    assert found.passed
    assert found.hypergradient_gap < 1e-5
    assert found.local is None
    assert found["local / global"].verdict == "skipped"


class Cubed(torch.autograd.Function):
    """y³ with a backward pass that cannot be differentiated again."""

    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        return y**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, slope):
        return 3 * ctx.saved_tensors[0] ** 2 * slope


def norm_cubed(y):
    """The same number from a distance whose backward pass torch cannot differentiate."""
    return torch.cdist(y[None], torch.zeros_like(y)[None], p=3.0).pow(3)


@pytest.mark.parametrize("cubes", [Cubed.apply, norm_cubed])
def test_losses_without_second_derivatives_are_sent_to_a_method_that_needs_none(cubes):
    def inner(x, y, data):
        return cubes(y["y"]).sum() / 3 - (x["x"] * y["y"]).sum()

    def outer(x, y, data):
        return (y["y"] - 1).square().sum()

    x = torch.tensor([4.0, 9.0], dtype=torch.float64)
    problem = rabo.Problem(inner=inner, outer=outer, x={"x": x}, y={"y": x / 2})
    found = rabo.check([rabo.Client(problem.on(inner=None, outer=None))])
    assert found["second derivatives"].verdict == "warning"
    assert found.options["algorithm"] == "rafbo"
    # y* = √x has curvature 2y* = 4 and 6
    assert found.spectra[0][:2] == pytest.approx((6, 4), rel=1e-5)
    assert found.estimators["directional-difference"].error < 1e-4
    assert found["neumann"].verdict == "skipped"


def test_a_y_that_is_not_convex_is_named_and_gets_another_method():
    def inner(x, y, data):
        return (y["y"].square() - 1).square().sum() / 4 - (x["x"] * y["y"]).sum() / 10

    def outer(x, y, data):
        return y["y"].square().sum()

    start = torch.full((3,), 0.2, dtype=torch.float64)
    problem = rabo.Problem(inner=inner, outer=outer, x={"x": start}, y={"y": start})
    clients = [rabo.Client(problem.on(inner=None, outer=None))] * 2
    found = rabo.check(clients)
    assert found.is_convex is False
    assert found["g convex in y"].verdict == "warning"
    assert found.passed
    assert found.options["algorithm"] == "simrabo"
    assert found.hypergradient_gap < 1e-5  # at the minimum that descent finds, g is convex


@pytest.mark.parametrize("is_harmless", [True, False])
def test_a_singular_hessian_matters_where_f_changes_along_it(is_harmless):
    def inner(x, y, data):
        return (y["y"][:2] - x["x"]).square().sum()

    def outer(x, y, data):
        return (y["y"][:2] if is_harmless else y["y"]).exp().sum()

    problem = rabo.Problem(
        inner=inner,
        outer=outer,
        x={"x": torch.ones(2, dtype=torch.float64)},
        y={"y": torch.zeros(3, dtype=torch.float64)},
    )
    found = rabo.check([rabo.Client(problem.on(inner=None, outer=None))])
    share = 0.0 if is_harmless else 1 / (1 + 2 * torch.e**2) ** 0.5  # ∇_y f = (e, e, 1) at y*
    assert found.spectra[0].num_flat == 1
    assert found.spectra[0].flat_share == pytest.approx(share, abs=1e-6)
    assert found["curvature of g in y"].verdict == ("ok" if is_harmless else "warning")


def test_a_solution_that_is_out_of_reach_skips_the_hypergradient():
    def inner(x, y, data):
        return nn.functional.softplus(-x["x"] * y["y"]).sum()  # falls for ever as y grows

    def outer(x, y, data):
        return (y["y"] - x["x"]).square().sum()

    one = torch.ones(1, dtype=torch.float64)
    problem = rabo.Problem(inner=inner, outer=outer, x={"x": one}, y={"y": 0 * one})
    found = rabo.check([rabo.Client(problem.on(inner=None, outer=None))])
    assert found["curvature of g in y"].verdict == "warning"
    assert found["hypergradient"].verdict == "skipped"


@pytest.mark.parametrize(("start", "alpha"), [(0.0, 0.01), (1e-3, 0.01), (0.5, 0.05), (7.0, 0.1)])
def test_the_outer_step_size_follows_the_size_of_x_within_bounds(start, alpha):
    def loss(x, y, data):
        return (y["y"] - x["x"]).square().sum()

    x = torch.full((3,), start, dtype=torch.float64)
    problem = rabo.Problem(inner=loss, outer=loss, x={"x": x}, y={"y": torch.ones_like(x)})
    found = rabo.check([rabo.Client(problem.on(inner=None, outer=None))])
    assert found.options["alpha"] == pytest.approx(alpha)
