"""Clients with what they have, and inputs that are wrong."""

import pytest
import torch
from torch import nn

import rabo
from rabo.algorithms import Adam, Cosine
from rabo.exchange.budgets import WIDTHS, Absent, Budget, at_round, parse_amount, width_for
from rabo.exchange.cost import Cost
from rabo.federation.solve import make_algorithm
from rabo.runs.experiment import Experiment
from rabo.seeding import stream
from rabo.tasks.quadratic import random_quadratic

FAMILY = random_quadratic(stream(0), 8, 8)


def client(i=0, capacity=1.0):
    return rabo.Client(FAMILY.client(stream(1, i)), capacity)


def test_a_trace_or_a_function_changes_the_width_by_round():
    clients = [client(0, [1.0, 0.5]), client(1, lambda q: 1 / (q + 1))]
    result = rabo.solve(clients, rounds=4, beta=0.01)
    widths = [dict(r.present) for r in result.history]
    assert [w[0] for w in widths] == [1.0, 0.5, 0.5, 0.5]
    assert [w[1] for w in widths] == [1.0, 1 / 2, 1 / 3, 1 / 4]


@pytest.mark.parametrize(("algorithm", "width"), [("fedavg", 1.0), ("rabo", 0.5)])
def test_the_record_says_which_width_a_client_trains(algorithm, width):
    """FedAvg is published for the full model, which it trains whatever the capacity."""
    result = rabo.solve([client(0), client(1, 0.5)], algorithm=algorithm, rounds=1, beta=0.01)
    assert result.history[0].present == {0: 1.0, 1: width}


@pytest.mark.parametrize("kind", ["memory", "multiply_adds", "traffic"])
def test_a_budget_gets_the_widest_submodel_that_fits(kind):
    def spent(width):
        federation = rabo.Federation([client()], rabo.RABO(beta=0.01))
        cost = federation.cost_at(0, width)
        return {
            "memory": cost.peak_memory_bytes,
            "multiply_adds": cost.multiply_adds,
            "traffic": cost.bytes_up + cost.bytes_down,
        }[kind]

    limit = spent(0.5)
    result = rabo.solve([client(0, Budget(**{kind: limit}))], rounds=1, beta=0.01)
    width = result.history[0].present[0]
    assert spent(width) <= limit
    wider = [w for w in WIDTHS if w > width]
    assert spent(min(wider)) > limit or spent(min(wider)) == spent(width)


def test_a_client_whose_budget_fits_nothing_sits_the_round_out_and_the_record_says_why():
    clients = [client(0), client(1, Budget(traffic=10))]
    result = rabo.solve(clients, rounds=2, beta=0.01)
    assert list(result.history[0].present) == [0]
    assert "traffic of" in result.history[0].absent[1]
    assert "exceeds 10" in result.history[0].as_dict()["absent"]["1"]
    assert result.coverage["x_min"] == 1


def test_a_round_in_which_nobody_can_take_part_changes_nothing():
    too_little = Budget(traffic=10)
    result = rabo.solve([client(0, [too_little, too_little])], rounds=2, beta=0.01)
    x, _ = client().problem.start()
    assert torch.equal(result.x["x"], x["x"])
    assert result.coverage["x_trained"] == 0


def test_clients_that_can_never_take_part_are_refused_before_the_first_round():
    with pytest.raises(ValueError, match="no client can take part in any round: no submodel fits"):
        rabo.solve([client(0, Budget(traffic=10))], rounds=2, beta=0.01)


def test_bisection_finds_the_boundary_for_every_limit():
    for limit in range(1, 18):
        cost = lambda w: Cost(peak_memory_bytes=round(16 * w))  # noqa: E731
        found = width_for(Budget(memory=limit), cost)
        assert found == min(limit, 16) / 16
    assert isinstance(width_for(Budget(memory=1), lambda w: Cost(peak_memory_bytes=2)), Absent)


def test_partial_participation_draws_as_many_clients_as_asked_for():
    clients = [client(i) for i in range(10)]
    result = rabo.solve(clients, rounds=5, participation=0.3, beta=0.01)
    drawn = [tuple(r.present) for r in result.history]
    assert {len(d) for d in drawn} == {3}
    assert len(set(drawn)) > 1


@pytest.mark.parametrize(
    ("text", "amount"),
    [("512MB", 512 * 10**6), ("2GiB", 2**31), ("1e9", 10**9), ("1.5k", 1500)],
)
def test_amounts_are_read_as_people_write_them(text, amount):
    assert parse_amount(text) == amount


def hopeless(x, y, data):
    return x["x"].sum() * y["y"].sum()


def tree_problem(**kwargs):
    options = {"inner": hopeless, "outer": hopeless} | kwargs
    return rabo.Problem(x={"x": torch.ones(2)}, y={"y": torch.ones(2)}, **options).on(
        inner=None, outer=None
    )


def frozen():
    layer = nn.Linear(2, 2)
    layer.weight.requires_grad_(False)
    return rabo.Problem(inner=hopeless, outer=hopeless, x=layer, y={"y": torch.ones(2)})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rabo.solve([]), "at least one client"),
        (lambda: rabo.solve(client()), "must be a list of clients, .* got a single Client"),
        (lambda: rabo.solve([tree_problem()]), "got a list of ClientProblem"),
        (lambda: client(capacity=0.0), r"must lie in \(0, 1\]"),
        (lambda: client(capacity=1.5), r"must lie in \(0, 1\]"),
        (lambda: client(capacity=[]), "at least one entry"),
        (lambda: client(capacity=[1.0, -1.0]), r"must lie in \(0, 1\]"),
        (lambda: at_round(lambda q: 2.0, 0), r"must lie in \(0, 1\]"),
        (lambda: at_round(lambda q: None, 0), r"must lie in \(0, 1\] .* got None"),
        (lambda: Budget(), "must have a limit"),
        (lambda: Budget(memory=0), "must be positive"),
        (lambda: Budget(memory="lots"), "must look like 512MB"),
        (lambda: rabo.solve([client()], rounds=0), "rounds must be"),
        (lambda: rabo.solve([client()], rounds=2.5), "whole number"),
        (lambda: rabo.solve([client()], round=2), "Did you mean 'rounds'"),
        (lambda: rabo.solve([client()], beta="automatic"), "Did you mean 'auto'"),
        (lambda: frozen(), "x.weight must be trained, got a frozen parameter"),
        (lambda: rabo.solve([client()], participation=0), "participation must lie"),
        (lambda: rabo.solve([client()], evaluate_every=0), "evaluate_every must be"),
        (lambda: rabo.solve([client()], algorithm="rabbo"), "Did you mean 'rabo'"),
        (lambda: rabo.solve([client()], alhpa=1), "Did you mean 'alpha'"),
        (lambda: rabo.solve([client()], algorithm="fednest", neumann=5), "mean 'num_terms'"),
        (lambda: rabo.solve([client()], neumann=5), "Did you mean 'hypergradient'"),
        (lambda: rabo.solve([client()], lr=0.1), "Did you mean 'alpha' or 'beta'"),
        (lambda: make_algorithm("simfbo", local_steps=2), "Did you mean 'num_local_steps'"),
        (lambda: make_algorithm("rabo", inner_steps=2), "Did you mean 'num_inner_steps'"),
        (lambda: rabo.solve([client()], algorithm=rabo.RABO(), alpha=1), "belong to the algorithm"),
        (lambda: rabo.solve([rabo.Client(tree_problem(), 0.5)]), "nothing of this problem can be"),
        (lambda: tree_problem(prune="all"), "prune must be"),
        (lambda: tree_problem(batch_size=0), "batch_size must be"),
        (lambda: tree_problem(copies=0), "copies must be"),
    ],
)
def test_bad_input_says_what_must_hold(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_data_of_different_lengths_is_refused_before_anything_runs():
    problem = rabo.Problem(
        inner=hopeless, outer=hopeless, x={"x": torch.ones(2)}, y={"y": torch.ones(2)}, batch_size=2
    )
    with pytest.raises(ValueError, match="must have one length"):
        problem.on(inner=(torch.ones(3), torch.ones(4)), outer=torch.ones(3))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_names_client_and_round(value):
    def bad(x, y, data):
        return y["y"].square().sum() * (value if data else 1.0)

    problem = rabo.Problem(
        inner=bad, outer=bad, x={"x": torch.ones(2)}, y={"y": torch.ones(2)}, prune="none"
    )
    clients = [rabo.Client(problem.on(inner=i == 1, outer=i == 1)) for i in range(2)]
    with pytest.raises(rabo.ClientError, match="client 1 failed in round 1"):
        rabo.solve(clients, rounds=2, beta=0.1)


def test_an_outer_loss_that_is_not_finite_is_named():
    def outer(x, y, data):
        return (y["y"] * data).sum()

    def inner(x, y, data):
        return (y["y"] - x["x"]).square().sum()

    problem = rabo.Problem(inner=inner, outer=outer, x={"x": torch.ones(2)}, y={"y": torch.ones(2)})
    wrong = problem.on(inner=None, outer=torch.tensor([1.0, torch.inf]))
    with pytest.raises(rabo.ClientError, match="the outer loss is inf"):
        rabo.solve([rabo.Client(wrong)], rounds=1, beta=0.1)


def test_a_loss_of_the_wrong_shape_is_named():
    problem = tree_problem(inner=lambda x, y, d: y["y"])
    with pytest.raises(rabo.ClientError, match=r"inner loss must be one number, got shape \(2,\)"):
        rabo.solve([rabo.Client(problem)], rounds=1)


def test_a_flat_inner_problem_says_what_to_do_instead_of_dividing_by_zero():
    with pytest.raises(rabo.NonFiniteError, match="give beta as a number"):
        rabo.solve([rabo.Client(tree_problem())], rounds=1)


def test_dropout_is_reproducible_and_independent_of_the_global_seed():
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    data = torch.randn(6, 4)

    def loss(x, y, d):
        return y(d).square().mean() + x["x"].exp().sum() * y["0.weight"].square().sum()

    problem = rabo.Problem(inner=loss, outer=loss, x={"x": torch.zeros(1)}, y=net, example=data)

    def run(seed):
        torch.manual_seed(seed)
        clients = [rabo.Client(problem.on(inner=data, outer=data), 0.5) for _ in range(2)]
        return rabo.solve(clients, rounds=2, beta=0.01, alpha=0.01).y["0.weight"]

    assert torch.equal(run(0), run(1))


def test_batches_are_drawn_anew_for_every_step_or_once_a_round():
    seen = []

    def loss(x, y, d):
        seen.append(d.tolist())
        return y["y"].square().sum() * x["x"].sum() + d.sum() * y["y"].sum()

    def batches(redraw):
        seen.clear()
        problem = rabo.Problem(
            inner=loss,
            outer=lambda x, y, d: y["y"].square().sum() * x["x"].sum(),
            x={"x": torch.ones(1)},
            y={"y": torch.ones(1)},
            batch_size=2,
            redraw=redraw,
        )
        bound = problem.on(inner=torch.arange(50.0), outer=torch.arange(50.0))
        rabo.solve([rabo.Client(bound)], rounds=1, beta=0.01, num_inner_steps=4)
        return {tuple(d) for d in seen}

    assert len(batches("round")) == 1
    assert len(batches("step")) > 4


def points(batch_size, seen=None):
    def features(x, data):
        if seen is not None:
            seen.append(len(data))
        return data @ x["x"]

    return rabo.Problem(
        inner=lambda z, y, d: (z @ y["y"] - 1).square().mean() + y["y"].square().sum(),
        outer=lambda z, y, d: (z @ y["y"] + 1).square().mean(),
        features=features,
        x={"x": torch.eye(3, 2).double()},
        y={"y": torch.ones(2).double()},
        batch_size=batch_size,
    ).on(inner=torch.randn(6, 3).double(), outer=torch.randn(9, 3).double())


@pytest.mark.parametrize(("batch_size", "whole"), [(5, ()), (6, (0,)), (8, (0,)), (9, (0, 1))])
def test_a_batch_that_holds_all_data_is_the_data_itself(batch_size, whole):
    problem = points(batch_size)
    batch = problem.batch(stream(0))
    same = tuple(i for i in (0, 1) if batch[i] is problem.data[i])
    assert same == whole
    assert [len(part) for part in batch] == [min(batch_size, 6), min(batch_size, 9)]
    assert (batch is problem.data) == (whole == (0, 1))


@pytest.mark.parametrize("batch_size", [2, 6, 8, 20])
def test_one_level_of_a_batch_has_the_items_that_the_whole_batch_has(batch_size):
    problem = points(batch_size)
    batch = problem.batch(stream(3))
    for level in ("inner", "outer"):
        alone = problem.batch_of(level, lambda: stream(3))
        assert torch.equal(getattr(alone, level), getattr(batch, level))


def test_batches_that_hold_all_data_compute_the_features_as_often_as_no_batches():
    numbers = []
    for batch_size in (None, 100):
        seen = []
        clients = [rabo.Client(points(batch_size, seen))]
        rabo.solve(clients, algorithm="fednest", rounds=2, beta=0.01, smoothness=9.0)
        numbers.append(seen)
    assert numbers[0] == numbers[1]


def test_capacities_that_the_policy_ignores_are_warned_of_once_with_the_remedy():
    clients = [client(0, [1.0, 0.5]), client(1)]
    for algorithm in ("fednest", "simfbo", "fedavg"):
        with pytest.warns(
            rabo.CapacityWarning, match="client 0.*0.5.*policy='importance'"
        ) as found:
            rabo.solve(clients, algorithm=algorithm, rounds=3, beta=0.01)
        assert len(found) == 1


def test_capacities_are_not_warned_of_where_submodels_are_trained_or_all_have_capacity_1():
    for capacity, options in ((0.5, {"policy": "importance"}), (1.0, {})):
        rabo.solve([client(0, capacity)], algorithm="fednest", rounds=1, beta=0.01, **options)


def test_nobody_present_is_no_error_with_measured_step_sizes_either():
    result = rabo.solve([client(0, lambda _: Budget(traffic=10))], rounds=12)
    assert len(result.history) == 12
    assert "traffic" in result.history[11].absent[0]


def test_a_budget_means_the_same_with_a_measured_step_size():
    whole = rabo.Federation([client()], rabo.RABO(beta=0.01)).cost_at(0, 1.0)
    budget = Budget(multiply_adds=whole.multiply_adds)
    for options in ({}, {"beta": 0.01}, {"warm_up": 3}):
        result = rabo.solve([client(0, budget)], rounds=1, **options)
        assert result.history[0].present[0] == 1.0


def test_clients_with_different_parameters_are_refused_by_name():
    other = random_quadratic(stream(0), 8, 7).client(stream(1))
    with pytest.raises(ValueError, match=r"client 1: y\.y is \(8,\) at client 0 and \(7,\) there"):
        rabo.solve([client(), rabo.Client(other)])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: client(capacity="1/2"), "got the text '1/2'"),
        (lambda: rabo.RABO(beta="Auto"), "positive number or 'auto'"),
        (lambda: rabo.RABO(policy=rabo.Rolling), "must be an object such as"),
        (lambda: rabo.RABO(hypergradient="cg"), "must be an object such as"),
        (lambda: rabo.solve([client()], policy="roling"), "Did you mean 'rolling'"),
        (lambda: tree_problem(redraw="steps"), "redraw must be"),
        (lambda: rabo.solve([client()], beta=lambda q: -1.0, rounds=1), "must not be negative"),
        (
            lambda: rabo.Problem(inner=hopeless, outer=hopeless, x={}, y={"y": torch.ones(1)}),
            "x must have at least one parameter",
        ),
        (
            lambda: rabo.Problem(
                inner=hopeless,
                outer=hopeless,
                x={"a": torch.ones(1)},
                y={"b": torch.zeros(2).int()},
            ),
            "y.b must be a tensor of floating point numbers, got torch.int32; convert it",
        ),
        (
            lambda: rabo.Problem(inner=hopeless, outer=hopeless, x={"a": [1.0]}, y={}),
            "x.a must be a tensor of floating point numbers, got list; convert it",
        ),
    ],
)
def test_more_bad_input_says_what_must_hold(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_parameters_of_different_precision_keep_their_own():
    problem = rabo.Problem(
        inner=lambda x, y, d: y["a"].square().sum() + y["b"].double().square().sum() * x["x"].sum(),
        outer=lambda x, y, d: y["a"].sum() + y["b"].sum(),
        x={"x": torch.ones(1)},
        y={"a": torch.ones(2).double(), "b": torch.ones(2)},
    ).on(inner=None, outer=None)
    result = rabo.solve([rabo.Client(problem)], rounds=2)
    assert result.y["a"].dtype == torch.float64
    assert result.y["b"].dtype == torch.float32


def test_policies_and_estimators_may_be_given_by_name():
    named = rabo.solve([client()], policy="rolling", hypergradient="neumann", rounds=1, beta=0.01)
    made = rabo.solve(
        [client()], policy=rabo.Rolling(), hypergradient=rabo.Neumann(), rounds=1, beta=0.01
    )
    assert torch.equal(named.x["x"], made.x["x"])


def test_objects_may_be_given_as_plain_options():
    options = {
        "policy": {"name": "segments", "num_segments": 2, "assignment": [1, 0]},
        "hypergradient": {"name": "neumann", "num_terms": 3},
        "outer_step": "adam",
        "beta": {"name": "cosine", "start": 0.1, "rounds": 9},
    }
    made = make_algorithm("rabo", **options)
    assert made == rabo.RABO(
        policy=rabo.Segments(num_segments=2, assignment=[1, 0]),
        hypergradient=rabo.Neumann(num_terms=3),
        outer_step=Adam(),
        beta=Cosine(0.1, 9),
    )
    assert make_algorithm("rabo", beta="auto") == rabo.RABO()
    with pytest.raises(ValueError, match="with its own options"):
        make_algorithm("rabo", hypergradient={"name": "neumann", "terms": 3})
    with pytest.raises(ValueError, match="unknown hypergradient ''"):
        make_algorithm("rabo", hypergradient={"num_terms": 3})


def test_capacities_may_move_on_to_the_next_client_every_round():
    options = {"task": "quadratic", "clients": 3, "capacities": "1,1/2,1/4", "rounds": 2}
    federation, _ = Experiment(**options, rotate_capacities=True).federation()
    widths = [list(done.present.values()) for done in federation.run(2)]
    assert widths == [[1, 1 / 2, 1 / 4], [1 / 2, 1 / 4, 1]]


def test_a_schedule_of_plain_options_runs_over_all_rounds():
    cosine = {"name": "cosine", "start": 0.1}
    schedules = {"alpha": cosine, "beta": {**cosine, "rounds": 5}}
    options = {"task": "quadratic", "clients": 1, "rounds": 7, "algorithm_options": schedules}
    federation, _ = Experiment(**options).federation()
    assert federation.algorithm.alpha == Cosine(0.1, 7)
    assert federation.algorithm.beta == Cosine(0.1, 5)
    plain = rabo.solve([client()], alpha=cosine, beta=0.01, rounds=3)
    made = rabo.solve([client()], alpha=rabo.Cosine(0.1, 3), beta=0.01, rounds=3)
    assert torch.equal(plain.x["x"], made.x["x"])


@pytest.mark.parametrize("beta", ["auto", 0.01])
def test_a_loss_that_is_nan_from_the_start_is_named_as_such(beta):
    def nan(x, y, data):
        return (x["x"].sum() * y["y"]).square().sum() * float("nan")

    problem = rabo.Problem(inner=nan, outer=nan, x={"x": torch.ones(2)}, y={"y": torch.ones(2)})
    clients = [rabo.Client(problem.on(inner=None, outer=None))]
    with pytest.raises(rabo.ClientError, match=r"client 0 .* the inner loss is nan"):
        rabo.solve(clients, rounds=1, beta=beta)
