"""The paper's theory on problems whose every number is known."""

import json
import sys
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F

import experiments.theory as theory
from experiments.theory.bias import bias_clients, local_limit
from experiments.theory.contraction import measure_contraction
from experiments.theory.diagonal import diagonals, difference_from_round, hypergradient
from experiments.theory.differences import (
    STEEPEST,
    curved_problem,
    lipschitz_bound,
    measure_differences,
)
from experiments.theory.rate import measure_rate, rate_clients, vectorised
from experiments.theory.rounds import Blocks, states
from rabo import RABO, ConjugateGradient, Full
from rabo.runs.plots import log_slope
from rabo.seeding import stream
from rabo.tasks.quadratic import ClosedForm, random_quadratic

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def contraction():
    return measure_contraction(quick=True, seed=0)


@pytest.fixture(scope="module")
def differences():
    return measure_differences(quick=True, seed=0)


@pytest.fixture(scope="module")
def rate():
    return measure_rate(quick=True, seed=0)


@pytest.fixture(scope="module")
def bias():
    return theory.measure_bias(quick=True, seed=0)


def test_without_noise_a_round_contracts_as_gradient_descent_does(contraction):
    for factor, exact in zip(contraction.factors, contraction.exact, strict=True):
        assert 0.8 * exact <= factor <= exact * (1 + 1e-9)
    assert contraction.exact[0] <= contraction.lemma < 1
    assert contraction.factors[0] > contraction.factors[1] > contraction.factors[2]


def test_noise_settles_at_its_closed_form_below_the_floor_of_lemma_4(contraction):
    for floor in contraction.floors:
        assert floor.measured == pytest.approx(floor.exact, rel=0.2)
        assert all(m <= b for m, b in zip(floor.measured, floor.bound, strict=True))
        assert log_slope(floor.coverages, floor.measured) == pytest.approx(-1, abs=0.1)


def test_fixed_masks_on_clients_that_differ_rest_above_the_floor_of_lemma_4(contraction):
    fixed = contraction.fixed_masks
    assert fixed.after == pytest.approx(fixed.before, rel=1e-9)
    assert fixed.after > 10 * fixed.floor


def test_the_error_of_coordinate_differences_is_linear_until_rounding(differences):
    assert differences.slope == pytest.approx(1, abs=0.02)
    for mu, error in zip(differences.steps, differences.errors, strict=True):
        if 1e-6 <= mu <= 1e-3:
            assert error == pytest.approx(differences.leading * mu, rel=0.05)
    assert differences.errors[-1] > 100 * min(differences.errors)


def test_the_error_of_coordinate_differences_stays_below_the_corrected_bound(differences):
    found = zip(differences.steps, differences.errors, differences.bounds, strict=True)
    shares = [error / bound for mu, error, bound in found if mu >= 1e-6]  # rounding rules below
    assert len(shares) >= 3
    assert 0 < min(shares) <= max(shares) <= 1


def test_the_printed_algorithm_2_points_uphill(differences):
    assert differences.literal_cosine < -0.5
    assert differences.literal_relative_error > 1


def test_the_dense_truth_is_what_implicit_differentiation_finds():
    curved = curved_problem(1)
    client = curved.problem.on(inner=None, outer=None)
    found = ConjugateGradient(num_iterations=20)(client, curved.x, curved.y, client.data)
    torch.testing.assert_close(found.value["x"], curved.truth, rtol=1e-9, atol=1e-9)


def test_no_direction_bends_the_hessian_more_than_the_lipschitz_bound(generator):
    rows = torch.randn(30, 6, generator=generator, dtype=torch.float64)
    directions = F.normalize(torch.randn(6, 5000, generator=generator, dtype=torch.float64), dim=0)
    bent = STEEPEST * (rows @ directions).abs().pow(3).mean(dim=0)
    assert 0.3 * lipschitz_bound(rows) < bent.max() <= lipschitz_bound(rows)


@pytest.mark.parametrize(
    "policy",
    [
        Blocks(1),
        Blocks(8, rotate=True),
        Blocks(4),
        Blocks(2, rotate=True, cut_groups="x"),
        Blocks(4, cut_groups="y"),
    ],
    ids=str,
)
def test_the_vectorised_round_is_the_round_of_rabo(policy):
    assert _gap(rate_clients(3), policy) < 1e-10
    assert _gap(_clients_that_differ_in_everything(), policy) < 1e-10


def _gap(clients, policy):
    return difference_from_round(vectorised(clients, [policy], 10), clients, policy, 10, seed=3)


def _clients_that_differ_in_everything():
    family = random_quadratic(stream(5, "family"), 16, 16, diagonal=True, condition=3)
    return [family.client(stream(5, "client", i), sigma_f=0.5) for i in range(8)]


def test_the_comparison_of_rounds_notices_another_problem():
    """What the vectorised round does not model (noise in ∇_y g) must show."""
    noisy = [replace(p, sigma_g=1e-3) for p in rate_clients(3)]
    assert _gap(noisy, Blocks(2, rotate=True)) > 1e-6


def test_the_diagonal_hypergradient_is_the_closed_form():
    clients = _clients_that_differ_in_everything()
    x = torch.linspace(-1, 1, 16, dtype=torch.float64)
    expected = ClosedForm.of(clients).hypergradient(x)
    torch.testing.assert_close(hypergradient(diagonals(clients), x), expected)


def test_blocks_cover_every_unit_equally_in_every_round():
    for round in range(5):
        held = [Blocks(4, rotate=True).held("x", 16, client, round) for client in range(8)]
        assert torch.stack(held).sum(dim=0).tolist() == [2] * 16


def test_the_mean_squared_hypergradient_falls_like_one_over_the_root_of_rounds(rate):
    assert rate.slopes_in_rounds == pytest.approx([-0.5] * 4, abs=0.1)


def test_the_mean_squared_hypergradient_falls_like_one_over_the_root_of_coverage(rate):
    assert rate.slopes_in_coverage[-1] == pytest.approx(-0.5, abs=0.1)


def test_fixed_blocks_and_cutting_x_alone_leave_the_floor_of_the_closed_form(rate):
    for floor in rate.floors:
        assert floor.extrapolated == pytest.approx(floor.limit, rel=0.3)
    for curve in rate.values:  # rotating blocks leave none
        assert abs(2 * curve[-1] - curve[-2]) < 0.15 * curve[-1]


def test_local_hessians_rest_away_from_the_solution_the_more_clients_differ(bias):
    assert bias.distances[0] < 1e-9
    assert list(bias.distances) == sorted(bias.distances)
    assert bias.distances[-1] > 0.1


def test_smaller_steps_do_not_bring_local_hessians_nearer(bias):
    *local, exact = bias.runs
    assert len({run.alpha for run in local}) >= 2
    for run in local:
        assert run.from_limit < 1e-3
        assert run.distances[-1] == pytest.approx(bias.confirmed_distance, rel=0.05)
    assert exact.hessian == "global"
    assert exact.distances[-1] < 1e-3


def test_rabo_does_not_leave_the_rest_point_of_local_hessians():
    clients = bias_clients(1.0, 7, 0)
    x = local_limit(clients)
    truth = ClosedForm.of(clients)
    algorithm = RABO(
        hypergradient=ConjugateGradient(num_iterations=5),
        policy=Full(),
        alpha=0.1,
        num_inner_steps=1,
    )
    start = algorithm.init(clients[0])
    start = replace(start, x={"x": x}, y={"y": truth.inner_solution(x)})
    *_, end = states(algorithm, clients, 3, start)
    torch.testing.assert_close(end.x["x"], x, rtol=0, atol=1e-10)
    assert truth.hypergradient(x).norm() > 0.01


def test_run_theory_writes_a_figure_per_measurement_and_all_numbers(
    tmp_path, monkeypatch, contraction, differences, rate, bias
):
    found = {"contraction": contraction, "differences": differences, "rate": rate, "bias": bias}
    known = {
        name: (lambda *, quick, seed, name=name: found[name], draw)
        for name, (_, draw) in theory.MEASUREMENTS.items()
    }
    monkeypatch.setattr(theory, "MEASUREMENTS", known)
    lines = []
    results = theory.run_theory(tmp_path / "out", quick=True, seed=0, report=lines.append)
    assert json.loads((tmp_path / "out" / "theory.json").read_text()) == json.loads(
        json.dumps(results)
    )
    for name, each in found.items():
        assert asdict(each).items() <= results[name].items()
        assert all(results[name]["holds"].values())
        assert any(line.startswith(f"{name}: ") for line in lines)
        assert (tmp_path / "out" / f"{name}.svg").read_text().rstrip().endswith("</svg>")


def test_without_matplotlib_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'rabo\[compare\]'"):
        theory.run_theory(tmp_path, quick=True, seed=0, report=print)
