"""Problems of one loss, for single-level methods."""

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.func import functional_call

import rabo
from rabo.algorithms import ALGORITHMS
from rabo.execution import Recorded
from rabo.tree import leaves

SINGLE = ("fedavg", "static", "fedrolex", "oap", "oap-structured", "fiarse", "fiarse-structured")


def loss(x, y, data):
    return F.cross_entropy(y(x(data[0])), data[1])


def digits():
    images, labels = (torch.tensor(a) for a in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return images.float()[order] / 16, labels[order]


def network():
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(32, track_running_stats=False)
    return nn.Sequential(nn.Linear(64, 32), norm, nn.ReLU()), nn.Linear(32, 10)


def clients_of(problem, capacities=(1.0, 0.5, 0.5), each=200):
    images, labels = digits()
    parts = [slice(i * each, (i + 1) * each) for i in range(len(capacities))]
    return [
        rabo.Client(problem.on((images[p], labels[p])), c)
        for p, c in zip(parts, capacities, strict=True)
    ]


def accuracy(network, result):
    images, labels = (part[1200:] for part in digits())
    weights = {
        f"{i}.{k}": v for i, part in enumerate((result.x, result.y)) for k, v in part.items()
    }
    with torch.no_grad():
        logits = functional_call(network, weights, images)
    return float((logits.argmax(dim=1) == labels).double().mean())


@pytest.mark.parametrize("name", SINGLE)
def test_a_loss_alone_is_learnt_without_any_option(name):
    x, y = network()
    problem = rabo.Problem(loss=loss, x=x, y=y, example=digits()[0][:4])
    result = rabo.solve(clients_of(problem), algorithm=name, rounds=15)
    assert accuracy(nn.Sequential(x, y), result) > 0.75  # guessing: 0.1
    assert result.coverage["x_trained"] == 1.0
    losses = [done.metrics["training_loss"] for done in result.history]
    assert losses[-1] < 0.6 * losses[0]


def test_one_loss_equals_a_bilevel_problem_that_states_it_twice():
    x, y = network()
    twice = rabo.Problem(inner=loss, outer=loss, x=x, y=y, example=digits()[0][:4])
    once = rabo.Problem(loss=loss, x=x, y=y, example=digits()[0][:4])
    one = clients_of(once)
    two = [
        rabo.Client(twice.on(inner=c.problem.data.inner, outer=c.problem.data.inner), c.capacity)
        for c in one
    ]
    found = [rabo.solve(c, algorithm="static", rounds=3, levels="both") for c in (one, two)]
    for a, b in zip(*(leaves((r.x, r.y)) for r in found), strict=True):
        torch.testing.assert_close(a, b)
    assert found[0].history[0].metrics["training_loss"] == pytest.approx(
        found[1].history[0].metrics["training_loss"]
    )


def test_the_training_loss_is_the_mean_of_clients_before_their_first_step():
    x, y = network()
    problem = rabo.Problem(loss=loss, x=x, y=y, example=digits()[0][:4])
    clients = clients_of(problem, (1.0, 1.0))
    result = rabo.solve(clients, algorithm="fedavg", rounds=1)
    truth = sum(float(loss(x, y, c.problem.data.inner).detach()) for c in clients) / 2
    assert result.history[0].metrics["training_loss"] == pytest.approx(truth)


@pytest.mark.parametrize("runtime", [None, Recorded])
def test_a_whole_network_may_be_y_and_x_be_left_out(runtime):
    problem = rabo.Problem(
        loss=lambda _, net, data: F.cross_entropy(net(data[0]), data[1]),
        y=nn.Sequential(*network()),
        example=digits()[0][:4],
        batch_size=50,
    )
    clients = clients_of(problem)
    chosen = runtime and runtime({i: c.problem for i, c in enumerate(clients)})
    result = rabo.solve(clients, algorithm="static", rounds=15, runtime=chosen)
    images, labels = (part[1200:] for part in digits())
    with torch.no_grad():
        logits = clients[0].problem.call(result.y, images)
    assert float((logits.argmax(dim=1) == labels).double().mean()) > 0.75
    assert result.x == {}
    assert result.coverage["y_trained"] == 1.0
    assert result.relative_cost["bytes_up"] < 0.8


def test_a_sample_gets_the_data_of_the_loss():
    sizes = []

    def sample(data, generator):
        chosen = torch.randperm(len(data[1]), generator=generator)[:7]
        return data[0][chosen], data[1][chosen]

    def watched(x, y, data):
        sizes.append(len(data[1]))
        return loss(x, y, data)

    x, y = network()
    problem = rabo.Problem(loss=watched, x=x, y=y, example=digits()[0][:4], sample=sample)
    rabo.solve(clients_of(problem), algorithm="fedavg", rounds=1)
    assert set(sizes) == {7}


@pytest.mark.parametrize(
    "name", [n for n, kind in ALGORITHMS.items() if n not in SINGLE and not kind.is_episodic]
)
def test_bilevel_methods_refuse_it_in_one_line(name):
    x, y = network()
    problem = rabo.Problem(loss=loss, x=x, y=y, example=digits()[0][:4])
    with pytest.raises(ValueError, match=r"needs an inner and an outer loss.*fedavg") as found:
        rabo.solve(clients_of(problem), algorithm=name)
    assert "\n" not in str(found.value)


def problem_of(**options):
    x, y = network()
    return rabo.Problem(x=x, y=y, example=digits()[0][:4], **options)


DATA = (torch.zeros(4, 64), torch.zeros(4, dtype=torch.long))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: problem_of(), "got none of them"),
        (lambda: problem_of(inner=loss), "got inner"),
        (lambda: problem_of(inner=loss, outer=loss, loss=loss), "got inner, outer, loss"),
        (lambda: rabo.Problem(loss=loss), "y must have at least one parameter"),
        (lambda: rabo.Problem(inner=loss, outer=loss, y=nn.Linear(2, 2)), "x must have at least"),
        (lambda: problem_of(loss=loss).on(), r"problem\.on\(data\)"),
        (lambda: problem_of(loss=loss).on(DATA, outer=DATA), r"problem\.on\(data\)"),
        (lambda: problem_of(loss=loss).on(DATA, inner=DATA), r"problem\.on\(data\)"),
        (lambda: problem_of(inner=loss, outer=loss).on(DATA), r"problem\.on\(inner=.*outer="),
        (lambda: problem_of(inner=loss, outer=loss).on(inner=DATA), r"problem\.on\(inner=.*outer="),
        (
            lambda: problem_of(inner=loss, outer=loss, batch_size=2).on(inner=DATA, outer=None),
            "tensors of the outer data, got NoneType",
        ),
        (lambda: problem_of(loss=loss, batch_size=2).on(None), "of the data, got NoneType"),
        (
            lambda: problem_of(loss=loss).on(DATA).outer({}, problem_of(loss=loss).y, DATA),
            "no outer one",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_inner_names_the_data_of_one_loss_too():
    assert problem_of(loss=loss).on(inner=DATA).data.inner is DATA
