"""What a run costs and whom it covers."""

from types import BuiltinMethodType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rabo
from rabo.exchange.cost import Counter, Meter, measure
from rabo.models.convolutional import ResNet12
from rabo.seeding import stream
from rabo.tasks.quadratic import random_quadratic


def test_multiply_adds_are_those_of_the_products_that_ran():
    a, b = torch.randn(10, 20), torch.randn(20, 30)
    assert measure(lambda: a @ b)[1].multiply_adds == 10 * 20 * 30
    assert measure(lambda: (a @ b[:, 0]) @ a[:, 0])[1].multiply_adds == 10 * 20 + 10
    conv = nn.Conv2d(3, 5, 3, padding=1, bias=False)
    image = torch.randn(2, 3, 8, 8)
    forward = 2 * 8 * 8 * 5 * 3 * 9
    assert measure(lambda: conv(image))[1].multiply_adds == forward


def test_peak_memory_counts_live_tensors_only():
    def keeps():
        return [torch.zeros(1000) for _ in range(10)]

    def drops():
        for _ in range(10):
            torch.zeros(1000)

    assert measure(keeps)[1].peak_memory_bytes == 40_000
    assert measure(drops)[1].peak_memory_bytes <= 8_000


def test_nothing_of_ours_runs_while_a_tensor_dies():
    """A Ctrl-C that arrives in such a function is printed and forgotten by Python."""
    with Counter() as counter:
        kept = torch.ones(3) + 1
    assert len(kept) == 3
    followed = [each for each in counter._alive.values() if each() is not None]
    assert followed
    assert all(isinstance(each.__callback__, BuiltinMethodType) for each in followed)


def test_a_meter_counts_once_per_shape_and_takes_time_always():
    meter, a = Meter(), torch.randn(5, 5)
    first = meter.run("key", lambda: a @ a)[1]
    second = meter.run("key", lambda: a)[1]
    assert first.multiply_adds == second.multiply_adds == 125
    assert first.seconds != second.seconds


def quadratic_clients(capacities, **kwargs):
    family = random_quadratic(stream(0), 8, 6)
    return [rabo.Client(family.client(stream(1, i)), c) for i, c in enumerate(capacities)]


def test_bytes_are_exact():
    """Down: x and y, then y again, and four bytes per kept unit; up: y, then x. Float64."""
    result = rabo.solve(quadratic_clients([1.0, 0.5]), rounds=2, beta=0.01)
    per_round_down = 8 * (8 + 6 + 6) + 4 * 14 + 8 * (4 + 3 + 3) + 4 * 7
    per_round_up = 8 * (6 + 8) + 8 * (3 + 4)
    assert [r.cost.bytes_down for r in result.history] == [per_round_down] * 2
    assert [r.cost.bytes_up for r in result.history] == [per_round_up] * 2


def test_costs_are_kept_per_client_phase_and_round():
    result = rabo.solve(quadratic_clients([1.0, 0.5]), rounds=2, beta=0.01)
    entries = result.history[1].entries
    assert {(e.client, e.phase) for e in entries} == {
        (c, p) for c in (0, 1) for p in ("update_inner", "estimate_outer")
    }
    assert sum(e.cost.bytes_up for e in entries) == result.history[1].cost.bytes_up
    full, half = (sum(e.cost.multiply_adds for e in entries if e.client == c) for c in (0, 1))
    assert 0.2 < half / full < 0.35  # matrices of half the rows and columns
    assert result.ledger.by_phase["update_inner"].seconds > 0


def test_coverage_and_mask_noise_follow_their_definitions():
    clients = quadratic_clients([1.0, 0.5, 0.25])
    result = rabo.solve(clients, rounds=1, policy=rabo.Static(), beta=0.01)
    coverage = result.history[0].coverage
    assert coverage["x"].minimum == 1
    assert coverage["x"].num_trained == 8
    x, _ = clients[0].problem.start()
    noise = float(x["x"][2:].norm() / x["x"].norm())
    assert coverage["x"].mask_noise == pytest.approx(noise)


def test_entries_ever_trained_accumulate_over_rounds():
    result = rabo.solve(quadratic_clients([0.25]), rounds=3, policy=rabo.Rolling(), beta=0.01)
    assert [r.coverage["x"].ever_trained for r in result.history] == [2 / 8, 3 / 8, 4 / 8]
    ones = {"x": torch.ones(8)}
    assert result.ledger.ever_trained("x", ones)["x"].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


def few_shot_problem():
    def features(x, data):
        return x(data[0])

    def loss(z, y, data):
        return F.cross_entropy(y(z), data[1]) + 0.05 * y["weight"].square().sum()

    torch.manual_seed(0)
    data = torch.randn(10, 1, 28, 28), torch.arange(5).repeat(2)
    problem = rabo.Problem(
        inner=loss,
        outer=loss,
        features=features,
        x=ResNet12(),
        y=nn.Linear(640, 5),
        example=data[0],
    )
    return problem.on(inner=data, outer=data)


def test_a_resnet12_costs_what_the_paper_says():
    """Capacities {1,1/2,1/4,1/8,1/16}: 26.7 % of traffic and work in the paper (erratum 9)."""
    problem = few_shot_problem()
    capacities = [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16]
    clients = [rabo.Client(problem, c) for c in capacities]
    result = rabo.solve(clients, rounds=1, num_inner_steps=5)
    traffic = result.history[0].cost
    full = result.full_cost
    up, down = traffic.bytes_up / full.bytes_up, traffic.bytes_down / full.bytes_down
    work = traffic.multiply_adds / full.multiply_adds
    assert up == pytest.approx(0.266, abs=0.005)
    assert down == pytest.approx(0.266, abs=0.005)
    assert work == pytest.approx(0.27, abs=0.02)


def test_a_level_nobody_trains_is_judged_as_it_was_given():
    result = rabo.solve(quadratic_clients([1.0]), algorithm="fedavg", rounds=1)
    x = {"x": torch.ones(8)}
    assert torch.equal(result.ledger.ever_trained("x", x)["x"], x["x"])


def test_single_entries_travel_alone():
    """A quarter of the entries at width 1/2, and a bit per entry to say which."""
    clients = quadratic_clients([0.5])
    result = rabo.solve(clients, rounds=1, policy=rabo.Magnitude(), beta=0.01)
    kept_x, kept_y = round(8 / 4), round(6 / 4)
    assert result.history[0].cost.bytes_up == 8 * (kept_x + kept_y)
    assert result.history[0].cost.bytes_down == 8 * (kept_x + 2 * kept_y) + 2


@pytest.mark.parametrize("options", [{}, {"warm_up": 2}, {"beta": 0.01}, {"hessian": "global"}])
def test_clients_of_full_width_cost_what_the_full_model_costs(options):
    result = rabo.solve(quadratic_clients([1.0, 1.0]), rounds=4, **options)
    assert all(share == pytest.approx(1) for share in result.relative_cost.values())


def test_a_segment_is_compared_with_the_whole_model():
    clients = quadratic_clients([1.0] * 2)
    result = rabo.solve(clients, rounds=1, beta=0.01, policy=rabo.Segments(num_segments=2))
    assert result.relative_cost["bytes_up"] == pytest.approx(0.5)


def test_work_of_another_algorithm_is_counted_anew():
    problem = quadratic_clients([1.0])[0].problem
    runtime = rabo.execution.InProcess({0: problem})
    counts = []
    for steps in (1, 50):
        done = rabo.solve(
            [rabo.Client(problem)], rounds=1, beta=0.01, num_inner_steps=steps, runtime=runtime
        )
        counts.append(done.ledger.by_phase["update_inner"].multiply_adds)
    assert counts[1] == 50 * counts[0]


def test_server_memory_does_not_grow_with_the_number_of_clients():
    """The server's own work, with another cut for every client, on replies that are dropped."""
    from rabo.exchange.covering import CoveredMean
    from rabo.pruning.channels import declare
    from rabo.pruning.policies import Whole

    full = {"w": torch.randn(300, 300)}
    whole = Whole(declare({"x.w": ("rows", "columns")}, full, {}), full, {})

    def peak(num_clients):
        def serve():
            mean = CoveredMean(full)
            for i in range(num_clients):
                part = rabo.Random()(whole, 0.5, i, 0, stream(i)).x
                mean.add(part, part.extract(full))
            return mean.step(full, 0.1)

        return measure(serve)[1].peak_memory_bytes

    assert peak(256) < 1.1 * peak(32)  # a few index vectors are kept
