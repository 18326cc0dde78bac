"""Steps on y that follow the curvature, against dense matrices and closed forms."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rabo
from known_problems import one_round
from rabo.algorithms import ALGORITHMS, RABO
from rabo.algorithms.secants import SafeSteps, on_rows, ratio
from rabo.errors import ClientError
from rabo.execution import InProcess, Recorded
from rabo.federation.federation import Federation
from rabo.hypergradients.solvers import conjugate_gradient, neumann
from rabo.seeding import stream
from rabo.tasks.quadratic import Coefficients, Quadratic, random_quadratic

F64 = {"dtype": torch.float64}
LIES = [0.01, 100.0]  # what the server believes the curvature is, as a share of the truth


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **F64)


def symmetric(seed, values):
    """A matrix with these eigenvalues, and its eigenvectors."""
    basis, _ = torch.linalg.qr(normal(seed, len(values), len(values)))
    return basis @ torch.diag(values) @ basis.T, basis


def secant(y, way, turned):
    """‖turned‖/‖way‖ of one copy of y."""
    return ratio(turned.norm(), way.norm(), y.norm())


SPECTRA = st.lists(st.floats(0.1, 100), min_size=2, max_size=6).map(
    lambda values: torch.tensor(values, **F64)
)


@given(st.integers(0, 999), SPECTRA, st.floats(1e-3, 1e3))
def test_a_secant_along_an_eigenvector_is_its_eigenvalue(seed, values, length):
    H, basis = symmetric(seed, values)
    for k, value in enumerate(values.tolist()):
        way = length * basis[:, k]
        assert float(secant(way, way, H @ way)) == pytest.approx(value, rel=1e-9)


@given(st.integers(0, 999), SPECTRA)
def test_no_secant_exceeds_the_largest_eigenvalue_or_falls_below_the_smallest(seed, values):
    """Wherever y is."""
    H, _ = symmetric(seed, values)
    y, way = normal(seed + 1, 2, len(values))
    found = float(secant(y, way, H @ way))
    assert values.min() * (1 - 1e-9) <= found <= values.max() * (1 + 1e-9)


def test_a_copy_that_has_not_moved_has_no_secant():
    y, safe = torch.ones(2, 2), SafeSteps(0.1, torch.ones(2, 2))
    safe.check(y, torch.zeros(2, 2))
    way, turned = torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.0], [6.0, 8.0]])
    safe.check(y + way, turned)
    assert safe.curvature.tolist() == [[0.0], [2.0]]


@given(st.integers(0, 999), SPECTRA, st.floats(-8, 0))
def test_rounding_is_never_taken_for_curvature(seed, values, exponent):
    """In single precision, with steps from the size of y down to its rounding."""
    H = symmetric(seed, values)[0].float()
    y, way = normal(seed + 1, 2, len(values)).float()
    ahead = y + 10**exponent * way
    found = secant(ahead, ahead - y, H @ ahead - H @ y)
    assert float(found) <= 1.1 * values.max()
    if exponent > -2:
        assert float(found) >= 0.9 * values.min()


def test_a_step_100_times_too_long_is_taken_back_and_the_next_is_half_an_inverse_secant():
    value = 4.0
    start, minimum = torch.tensor([[3.0]], **F64), 1.0
    safe = SafeSteps(100 / (2 * value), start)

    def slope_at(y):
        return value * (y - minimum)

    y, slope, back = safe.check(start, slope_at(start))
    assert back is None
    ahead = safe.step(y, slope)
    assert abs(float(ahead) - minimum) > 90
    y, slope, back = safe.check(ahead, slope_at(ahead))
    assert back.tolist() == [[True]]
    assert torch.equal(y, start)
    assert torch.equal(slope, slope_at(start))
    assert safe.beta.tolist() == [[1 / (2 * value)]]
    y = safe.step(y, slope)
    y, _, back = safe.check(y, slope_at(y))
    assert back.tolist() == [[False]]
    assert y.tolist() == [[2.0]]  # half of the way to the minimum
    assert (safe.curvature.tolist(), safe.backtracks.tolist()) == ([[value]], [[1.0]])


def test_the_largest_secant_counts_and_not_the_last():
    """The way turns towards the eigenvector of the smallest eigenvalue."""
    values, y = torch.tensor([1.0, 9.0], **F64), torch.tensor([[1.0, 1.0]], **F64)
    safe, found, before = SafeSteps(0.1, y), [], None
    for _ in range(5):
        safe.check(y, values * y)
        if before is not None:
            found.append(float((values * (y - before)).norm() / (y - before).norm()))
        before, y = y, y - 0.1 * values * y
    assert found[0] > found[-1] + 1
    assert float(safe.curvature) == pytest.approx(found[0])


@given(st.lists(st.integers(0, 999), min_size=2, max_size=4), st.floats(0.01, 1.0))
def test_copies_of_y_keep_their_own_step_size(seeds, beta):
    """All at once they take the steps that each takes alone."""
    values = torch.tensor([0.5, 1.0, 2.0], **F64)
    H = torch.stack([symmetric(seed, 10 ** (seed % 3) * values)[0] for seed in seeds])

    def play(H, y):
        safe, velocity = SafeSteps(beta, y), torch.zeros_like(y)
        for _ in range(6):
            y, slope, back = safe.check(y, (H @ y.unsqueeze(2)).squeeze(2))
            kept = velocity if back is None else velocity.masked_fill(back, 0.0)
            velocity = slope + 0.5 * kept
            y = safe.step(y, velocity)
        return y, safe

    start = normal(1, len(seeds), 3)
    together, safe = play(H, start)
    for i in range(len(seeds)):
        alone, own = play(H[i : i + 1], start[i : i + 1])
        torch.testing.assert_close(together[i : i + 1], alone)
        torch.testing.assert_close(safe.beta[i], own.beta[0])
        assert safe.backtracks[i] == own.backtracks[0]


@pytest.mark.parametrize("copies", [1, 3])
def test_rows_of_y_are_its_copies(copies):
    """The gradient of Σ a²/2 + Σ b² is (a, 2b), copy by copy."""
    lead = (copies,) if copies > 1 else ()
    like = {"a": torch.zeros(*lead, 2), "b": torch.zeros(*lead, 2, 2)}
    slope = on_rows(lambda y: {"a": y["a"], "b": 2 * y["b"]}, like, copies)
    y = torch.arange(6.0 * copies).reshape(copies, 6)
    assert torch.equal(slope(y), y * torch.tensor([1.0, 1, 2, 2, 2, 2]))


def along_an_eigenvector(*values):
    """A client whose y starts at 0 and moves along the eigenvector of the last value.

    x has no part in g.
    """
    H, one = torch.diag(torch.tensor(values, **F64)), torch.eye(len(values), **F64)
    zeros = torch.zeros(len(values), **F64)
    return Quadratic(Coefficients(H, 0 * one, one[-1], one, zeros + 1, one, zeros))


def believing(algorithm, problems, curvature):
    """A state whose server has measured this curvature."""
    state = algorithm.init(problems[0])
    return replace(state, scalars={**state.scalars, "largest_curvature": curvature})


LONG = [
    ("rabo", {"num_inner_steps": 1}, 1),
    ("rabo", {"num_inner_steps": 2}, 1),  # the first is the one that is taken back
    ("rabo", {"num_inner_steps": 4}, 3),
    ("rabo", {"num_inner_steps": 2, "momentum": 0.9}, 1),  # momentum of that step is forgotten
    ("simrabo", {"num_inner_steps": 1}, 1),
    ("simrabo", {"num_inner_steps": 4}, 3),
    ("fedmbo", {"num_inner_steps": 3, "num_terms": 2}, 3),
    ("fedbioacc", {"num_local_steps": 1}, 1),
]
LONG += [(name, {"num_local_steps": 1}, 1) for name in ("simfbo", "shrofbo", "fedbio")]


@pytest.mark.parametrize(("name", "options", "num_steps"), LONG)
def test_y_goes_on_with_short_steps_where_beta_was_100_times_too_large(name, options, num_steps):
    """y_k = (1 − (1 − βλ)^k)/λ with βλ = 1/2."""
    problem, value = along_an_eigenvector(1.0, 9.0, 4.0), 4.0
    algorithm = ALGORITHMS[name](alpha=1e-9, **options)
    start = believing(algorithm, [problem], value / 100)
    after = one_round(algorithm, [problem], start)
    y = torch.tensor([0.0, 0.0, (1 - 0.5**num_steps) / value], **F64)
    torch.testing.assert_close(after.y["y"], y, rtol=1e-12, atol=1e-12)


# without products: only steps on y show the curvature
STEPS_ALONE = [
    ("rabo", {"warm_up": 9}),
    ("rabo", {"warm_up": 9, "num_inner_steps": 1}),
    ("simrabo", {}),
    ("simrabo", {"num_inner_steps": 1, "num_local_steps": 3}),
    ("simrafbo", {"num_inner_steps": 2, "num_local_steps": 3}),
    ("simfbo", {}),
    ("shrofbo", {}),
    ("fedbio", {}),
    ("fedbioacc", {}),
    ("fedmbo", {"num_terms": 1}),
    ("fednest", {"num_terms": 1}),
    ("aggitd", {"num_inner_steps": 1}),
]


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize(("name", "options"), [*STEPS_ALONE, ("rabo", {}), ("rafbo", {})])
def test_the_next_beta_is_that_of_the_most_curved_client(name, options, lie, monkeypatch):
    """Isotropic: every secant and every product sees the whole curvature, above or below."""
    monkeypatch.setattr("rabo.algorithms.inner.FADING", 0.0)
    problems = [along_an_eigenvector(*[value] * 3) for value in (2.0, 8.0, 5.0)]
    algorithm = ALGORITHMS[name](alpha=1e-9, **options)
    state = one_round(algorithm, problems, believing(algorithm, problems, 8.0 * lie))
    state = one_round(algorithm, problems, state)
    assert state.scalars["beta"] == pytest.approx(1 / (2 * 8.0), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "options"), [*STEPS_ALONE, ("rabo", {"num_outer_steps": 3}), ("rafbo", {})]
)
def test_neither_noise_nor_moves_of_x_are_taken_for_curvature(name, options, monkeypatch):
    """∇_y g = 4y − Bx − noise: slopes on other batches, or where x was, differ by more."""
    monkeypatch.setattr("rabo.algorithms.inner.FADING", 0.0)
    problem = along_an_eigenvector(*[4.0] * 3)
    m = problem.coefficients._replace(B=10 * normal(0, 3, 3))
    problem = replace(problem, coefficients=m, sigma_g=10.0, sigma_f=10.0)
    algorithm = ALGORITHMS[name](alpha=0.1, **options)
    after = one_round(algorithm, [problem], believing(algorithm, [problem], 16.0))
    assert after.scalars["largest_curvature"] == pytest.approx(4.0, rel=1e-6)


def test_the_clients_that_train_y_alone_show_the_next_beta_too():
    problems = [along_an_eigenvector(4.0, 4.0) for _ in range(2)]
    algorithm = ALGORITHMS["fednest"](alpha=1e-9, num_terms=1, separate_clients=True)
    after = one_round(algorithm, problems, believing(algorithm, problems, 0.04))
    assert after.scalars["largest_curvature"] == pytest.approx(4.0, rel=1e-6)


@pytest.mark.parametrize(("name", "rounds"), [("rabo", 60), ("simrabo", 100)])
def test_beta_stays_above_half_the_inverse_curvature_when_y_has_converged(name, rounds):
    """No secant and no product of a quadratic exceeds its largest eigenvalue."""
    problem = random_quadratic(stream(0, "family"), 6, 5).client(stream(0, 0))
    largest = float(torch.linalg.eigvalsh(problem.coefficients.H)[-1])
    single = Quadratic(Coefficients(*(t.float() for t in problem.coefficients)))
    algorithm = ALGORITHMS[name](alpha=0.2)
    history = rabo.solve([rabo.Client(single)], algorithm=algorithm, rounds=rounds).history
    assert min(done.metrics["beta"] for done in history) > 0.9 / (2 * largest)


def test_a_truncated_series_shrinks_to_the_curvature_that_its_products_see():
    """Isotropic, L 100 times too small: the second term is zero, and the sum is exact."""
    problem = along_an_eigenvector(4.0, 4.0)
    algorithm = ALGORITHMS["fednest"](
        alpha=1e-3, series="truncated", num_terms=3, num_inner_steps=1, num_local_steps=1
    )
    state = believing(algorithm, [problem], 0.04)
    m = problem.coefficients._replace(B=normal(0, 2, 2))
    problem = replace(problem, coefficients=m)
    after = one_round(algorithm, [problem], state)
    x, y = state.x["x"], after.y["y"]
    slope = m.P @ x - m.s + m.B.T @ torch.linalg.solve(m.H, m.K @ y - m.t)
    torch.testing.assert_close(after.x["x"], x - 1e-3 * slope, rtol=1e-10, atol=1e-12)


def growing():
    """Two clients with g_i = ½(1 + ‖x‖²)‖y − x‖² and f_i = ½‖y − t_i‖²: x* = (4, 4).

    The curvature is 1 at the start and 33 at the solution.
    """

    def inner(x, y, t):
        return (1 + x["x"].square().sum()) * (y["y"] - x["x"]).square().sum() / 2

    def outer(x, y, t):
        return (y["y"] - t).square().sum() / 2

    zero = torch.zeros(2, **F64)
    problem = rabo.Problem(inner=inner, outer=outer, x={"x": zero}, y={"y": zero})
    targets = (torch.tensor(t, **F64) for t in ([6.0, 2.0], [2.0, 6.0]))
    return [rabo.Client(problem.on(inner=t, outer=t)) for t in targets]


@pytest.mark.filterwarnings("ignore::rabo.federation.alarms.DivergenceWarning")
@pytest.mark.parametrize("name", ["rabo", "rafbo", "simrabo", "simrafbo"])
def test_curvature_that_grows_33_fold_on_the_way_to_the_solution_ends_no_run(name):
    options = {"algorithm": name, "outer_step": "descent", "alpha": 0.2, "rounds": 40}
    with pytest.raises(ClientError):
        rabo.solve(growing(), beta=0.5, **options)  # 1/(2·1): as calibrated once, at the start
    x = rabo.solve(growing(), **options).x["x"]
    torch.testing.assert_close(x, torch.full((2,), 4.0, **F64), rtol=1e-2, atol=0)


@pytest.mark.parametrize("name", ["rabo", "fedmbo", "simfbo", "fedbioacc", "simrabo"])
def test_random_layers_draw_the_same_at_both_ends_of_a_secant(name, monkeypatch):
    """Else a tiny step would show a huge curvature: of steps of 5e-9, as the server asks for."""
    monkeypatch.setattr("rabo.algorithms.inner.FADING", 0.0)
    data = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double()
    y = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)).double()

    def loss(x, y, data):
        return (y(data) - x["x"]).square().mean()

    x = {"x": torch.ones(1, **F64)}
    problem = rabo.Problem(inner=loss, outer=loss, x=x, y=y, prune="none").on(
        inner=data, outer=data
    )
    bound = 2 * (4 * data.square().sum(dim=1) + 1).mean()  # dropout doubles what it keeps
    algorithm = ALGORITHMS[name](alpha=1e-9)
    after = one_round(algorithm, [problem], believing(algorithm, [problem], 1e8))
    assert 0 < after.scalars["largest_curvature"] <= bound


class Spy(InProcess):
    """Remembers the names of work and the numbers of replies."""

    def __init__(self, problems):
        super().__init__(problems)
        self.works, self.numbers = [], {}

    def map(self, work, requests):
        self.works.append(work.name)
        for reply in super().map(work, requests):
            self.numbers[work.name] = dict(reply.scalars)
            yield reply


@pytest.mark.parametrize(
    ("name", "options", "work"),
    [
        ("rabo", {"num_inner_steps": 3}, "update_inner"),
        ("simrabo", {"num_inner_steps": 3}, "move_together"),
        ("simfbo", {"num_local_steps": 3}, "take_steps"),
        ("fedmbo", {"num_inner_steps": 3, "num_terms": 2}, "inner_slope"),
    ],
)
def test_steps_of_a_given_size_are_all_taken_and_send_no_numbers(name, options, work):
    """β = 1.5/λ: a step that a measured β would take back."""
    value = 4.0
    problem = along_an_eigenvector(1.0, value)
    algorithm = ALGORITHMS[name](alpha=1e-9, beta=1.5 / value, **options)
    spy = Spy({0: problem})
    federation = Federation([rabo.Client(problem)], algorithm, runtime=spy)
    [done] = federation.run(1)
    y = torch.tensor([0.0, (1 - (1 - 1.5) ** 3) / value], **F64)
    torch.testing.assert_close(federation.state.y["y"], y, rtol=1e-12, atol=1e-12)
    assert spy.numbers[work] == {}
    assert "backtracks" not in done.metrics
    assert done.metrics["beta"] == 1.5 / value


def test_the_metrics_count_steps_taken_back_and_name_beta_and_the_curvature():
    problem = along_an_eigenvector(4.0, 4.0)
    federation = Federation([rabo.Client(problem)], RABO(alpha=1e-9, num_inner_steps=3))
    found = []
    for curvature in (None, 0.04, None):
        if curvature:
            federation.state = replace(
                federation.state,
                y={"y": torch.zeros(2, **F64)},
                scalars={"largest_curvature": curvature},
            )
        [done] = federation.run(1)
        names = ("backtracks", "beta", "largest_curvature")
        found.append([done.metrics[name] for name in names])
        assert "curvature" not in done.metrics  # of a client; the server makes the largest of it
    assert found[0] == pytest.approx([0, 1 / 8, 4])
    assert found[1] == pytest.approx([1, 1 / 0.08, 4])
    assert found[2] == pytest.approx([0, 1 / 8, 4])


def evaluations(name, beta, batch_size, **options):
    """How often g is evaluated in a round of one client, where the curvature is known already."""
    calls = []

    def inner(x, y, data):
        calls.append(1)
        return (y["y"] - x["x"] - data.mean()).square().sum()

    def outer(x, y, data):
        return (y["y"] - data.mean()).square().sum()

    start = {"x": {"x": torch.ones(2, **F64)}, "y": {"y": torch.zeros(2, **F64)}}
    problem = rabo.Problem(inner=inner, outer=outer, batch_size=batch_size, **start)
    client = problem.on(inner=normal(0, 8), outer=normal(1, 8))
    algorithm = ALGORITHMS[name](alpha=0.01, beta=beta, **options)
    one_round(algorithm, [client], believing(algorithm, [client], 8.0))
    return len(calls)


@pytest.mark.parametrize(
    ("name", "options", "batch_size", "more"),
    [
        ("rabo", {}, 3, 1),
        ("rafbo", {}, 3, 1),
        ("fedmbo", {"num_terms": 2}, 3, 1),
        ("simfbo", {}, 3, 1),
        ("fedbio", {}, 3, 1),
        ("simrabo", {"num_inner_steps": 1}, 3, 1),
        ("simrabo", {}, 3, 0),  # T steps on one batch show secants themselves
        ("fednest", {"num_terms": 2}, 3, 0),  # corrected steps are secants
        ("rabo", {}, None, 0),
        ("rabo", {"num_inner_steps": 1}, None, 1),  # one step shows no secant
    ],
)
def test_a_measured_step_size_costs_at_most_one_more_gradient_a_round(
    name, options, batch_size, more
):
    auto, given = (evaluations(name, beta, batch_size, **options) for beta in ("auto", 1 / 16))
    assert auto - given == more


BLOCKS = st.lists(SPECTRA.filter(lambda v: len(v) >= 3).map(lambda v: v[:3]), min_size=1)


@given(st.integers(0, 999), BLOCKS, st.integers(1, 6), st.sampled_from([0.0, 50.0]))
def test_the_curvature_that_solvers_see_is_positive_and_a_lower_bound(
    seed, spectra, number, damping
):
    """Of the matrix itself, whatever is added to it."""
    H = torch.stack([symmetric(seed + i, values)[0] for i, values in enumerate(spectra)])
    b = normal(seed, len(H), 3)
    largest = float(torch.stack(spectra).max())

    def product(p):
        return (H @ p.unsqueeze(2)).squeeze(2)

    first = float((product(b).norm(dim=1) / b.norm(dim=1)).max())  # both begin with b
    for found in (
        conjugate_gradient(product, b, number, damping=damping),
        neumann(product, b, number, 1 / largest),
    ):
        assert first * (1 - 1e-9) <= float(found.curvature) <= largest * (1 + 1e-9)
        assert first > 0


@pytest.mark.parametrize("number", [1, 2, 8])
def test_directions_after_the_solution_show_no_curvature(number):
    """b is an eigenvector: CG is done after one step, and what is left is rounding."""
    H, basis = symmetric(0, torch.tensor([1.0, 50.0, 99.0], **F64))
    found = conjugate_gradient(lambda p: p @ H, basis[:, 0][None], number)
    assert float(found.curvature) == pytest.approx(1.0)


def test_without_products_solvers_have_seen_no_curvature():
    found = conjugate_gradient(lambda p: p, torch.ones(1, 2), 0)
    assert float(found.curvature) == 0


@pytest.mark.parametrize(
    ("every", "measured"), [(None, [1, 0, 0, 0, 0]), (1, [1, 1, 1, 1, 1]), (2, [1, 0, 1, 0, 1])]
)
def test_curvature_is_measured_once_or_as_often_as_asked_for(every, measured):
    """The first round's measurement is that before the run."""
    problem = along_an_eigenvector(1.0, 4.0)
    spy = Spy({0: problem})
    algorithm = RABO(alpha=0.01, calibrate_every=every)
    federation = Federation([rabo.Client(problem)], algorithm, runtime=spy)
    found = []
    for _ in federation.run(5):
        found.append(spy.works.count("measure_curvature"))
        spy.works.clear()
    assert found == measured


def small_network(batch_size):
    g = torch.Generator().manual_seed(0)
    data = (torch.randn(12, 4, generator=g), torch.randn(12, 1, generator=g))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x, y = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def loss(x, y, data):
        return (y(x(data[0])) - data[1]).square().mean()

    problem = rabo.Problem(
        inner=lambda x, y, d: loss(x, y, d) + 0.1 * y["weight"].square().sum(),
        outer=loss,
        x=x,
        y=y,
        example=data[0][:3],
        batch_size=batch_size,
    )
    return [rabo.Client(problem.on(inner=data, outer=data), c) for c in (1.0, 0.5)]


@pytest.mark.parametrize("batch_size", [None, 5])
@pytest.mark.parametrize("name", ["rabo", "simrabo"])
def test_recorded_steps_follow_the_curvature_to_the_same_bits(name, batch_size):
    """Also where the recorded rounds take steps back."""
    found = []
    for kind in (InProcess, Recorded):
        clients = small_network(batch_size)
        algorithm = ALGORITHMS[name](alpha=0.05, num_inner_steps=3)
        runtime = kind({i: c.problem for i, c in enumerate(clients)})
        federation = Federation(clients, algorithm, runtime=runtime, compare=False)
        metrics = []
        for q in range(4):
            if q == 3:
                scalars = {**federation.state.scalars, "largest_curvature": 0.01}
                federation.state = replace(federation.state, scalars=scalars)
            metrics += [dict(done.metrics) for done in federation.run(1)]
        found.append((federation.state, metrics))
    (plain, plain_metrics), (fast, fast_metrics) = found
    assert plain_metrics[-1]["backtracks"] == 1
    assert plain_metrics == fast_metrics
    for level in ("x", "y"):
        for key, value in getattr(plain, level).items():
            assert torch.equal(value, getattr(fast, level)[key]), (level, key)


def scalar_in_y(copies):
    def inner(x, y, data):
        return (y["a"] - x["x"].sum()).square().sum() + y["w"].square().sum()

    def outer(x, y, data):
        return (y["a"] - 1).square().sum() + y["w"].sum()

    y = {"a": torch.tensor(0.5), "w": torch.ones(3)}
    return rabo.Problem(inner=inner, outer=outer, x={"x": torch.ones(2)}, y=y, copies=copies)


def mixed_precision_in_y(copies):
    def inner(x, y, data):
        assert [value.dtype for value in y.values()] == [torch.float64, torch.float32]
        return y["a"].square().sum() + y["b"].double().square().sum() * x["x"].sum()

    def outer(x, y, data):
        return y["a"].sum() + y["b"].sum()

    y = {"a": torch.ones(2, **F64), "b": torch.ones(2)}
    return rabo.Problem(inner=inner, outer=outer, x={"x": torch.ones(1)}, y=y, copies=copies)


@pytest.mark.parametrize("make", [scalar_in_y, mixed_precision_in_y])
@pytest.mark.parametrize(("name", "copies"), [("rabo", 1), ("rabo", 2), ("simrabo", 1)])
def test_tensors_of_y_keep_their_shape_and_precision(name, copies, make):
    client = rabo.Client(make(copies).on(inner=None, outer=None))
    result = rabo.solve([client], algorithm=name, rounds=2)
    for key, value in client.problem.start()[1].items():
        assert (result.y[key].shape, result.y[key].dtype) == (value.shape, value.dtype)


def test_a_step_that_overflows_is_taken_back_and_beta_becomes_a_tenth():
    start = torch.tensor([[9.0]])
    safe = SafeSteps(2.0, start)
    safe.check(start, torch.tensor([[1.0]]))
    for broken in (torch.inf, torch.nan):
        y, slope, back = safe.check(torch.tensor([[-90.0]]), torch.tensor([[broken]]))
        assert y == 9.0
        assert slope == 1.0
        assert back.all()
    assert float(safe.beta) == pytest.approx(0.02)
    assert safe.seen()["curvature"].isfinite()


def test_a_default_run_survives_a_gradient_that_overflows():
    def inner(x, y, data):
        return (y["y"].neg().exp() + y["y"] + x["x"] * y["y"]).sum()

    def outer(x, y, data):
        return (y["y"] - 1).square().sum()

    start = torch.full((1,), 9.0)
    problem = rabo.Problem(inner=inner, outer=outer, x={"x": 0 * start}, y={"y": start})
    result = rabo.solve([rabo.Client(problem.on(inner=None, outer=None))], rounds=5)
    assert result.y["y"].isfinite().all()


def stretched(condition):
    """g = ½(y − (0, x))ᵀ diag(condition, 1) (y − (0, x)), f = ½‖y − (1, 3)‖²: x* = 3."""
    curvature = torch.tensor([condition, 1.0], **F64)

    def inner(x, y, data):
        target = torch.cat([torch.zeros(1, **F64), x["x"]])
        return (curvature * (y["y"] - target).square()).sum() / 2

    def outer(x, y, data):
        return (y["y"] - torch.tensor([1.0, 3.0], **F64)).square().sum() / 2

    x, y = torch.zeros(1, **F64), torch.zeros(2, **F64)
    problem = rabo.Problem(inner=inner, outer=outer, x={"x": x}, y={"y": y})
    return [rabo.Client(problem.on(inner=None, outer=None)) for _ in range(2)]


BILEVEL = ["rabo", "rafbo", "simrabo", "simrafbo", "simfbo", "shrofbo", "fedbio", "fedbioacc"]


@pytest.mark.parametrize("name", [*BILEVEL, "fednest", "fedmbo", "aggitd"])
def test_sharp_directions_that_have_converged_are_not_forgotten_at_once(name):
    """Later steps see the curvature 1 alone, and β = 1/2 would diverge along the other."""
    history = rabo.solve(stretched(100.0), algorithm=name, rounds=100).history
    norms = [done.metrics["hypergradient_norm"] for done in history]
    assert len(norms) == 100
    assert max(norms) < 20


def test_a_curvature_that_no_step_sees_fades_by_a_tenth_a_round():
    problem = along_an_eigenvector(4.0, 4.0)
    algorithm = rabo.RABO(alpha=1e-9)
    after = one_round(algorithm, [problem], believing(algorithm, [problem], 80.0))
    assert after.scalars["largest_curvature"] == pytest.approx(72.0)


@pytest.mark.parametrize("name", ["fednest", "aggitd"])
@pytest.mark.parametrize("num_local_steps", [1, 2, 5])
def test_corrected_steps_go_back_where_beta_was_1000_times_too_large(name, num_local_steps):
    problems = [along_an_eigenvector(4.0, 4.0) for _ in range(2)]
    options = {"num_inner_steps": 1, "num_local_steps": num_local_steps, "alpha": 1e-9}
    algorithm = ALGORITHMS[name](**options)
    start = algorithm.init(problems[0]).y["y"]
    after = one_round(algorithm, problems, believing(algorithm, problems, 4e-3))
    best = torch.linalg.solve(
        problems[0].coefficients.H,
        problems[0].coefficients.B @ problems[0].start()[0]["x"] + problems[0].coefficients.c,
    )
    assert (after.y["y"] - best).norm() <= (start - best).norm()


def test_dropout_in_both_levels_does_not_collapse_beta():
    data = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3
    x = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Dropout(0.5))
    y = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))

    def loss(z, y, data):
        return torch.nn.functional.cross_entropy(y(z), data[1])

    problem = rabo.Problem(
        inner=loss, outer=loss, features=lambda x, d: x(d[0]), x=x, y=y, prune="none"
    ).on(inner=data, outer=data)
    for name in ("simfbo", "fedbioacc", "simrabo"):
        history = rabo.solve([rabo.Client(problem)], algorithm=name, rounds=10).history
        betas = [done.metrics["beta"] for done in history]
        assert min(betas) > 0.05 * betas[0], (name, betas)
