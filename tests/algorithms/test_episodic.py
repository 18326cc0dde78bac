"""Dist-ProtoNet and Dist-MAML against formulas written out task by task."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rabo
from known_problems import EPISODES, curved_problem, episodic_problem
from rabo.algorithms import DistMAML, DistProtoNet
from rabo.execution import ClientContext, InProcess
from rabo.federation.solve import make_algorithm
from rabo.problems.bilevel import Batch
from rabo.pruning.policies import Full
from rabo.runs.experiment import Experiment
from rabo.tasks.few_shot import FewShotTask

TASKS, WAYS, SHOTS, QUERIES = EPISODES
NAMES = ["dist-protonet", "dist-maml"]


def leaves_of(problem):
    return [{k: v.clone().requires_grad_() for k, v in p.items()} for p in problem.start()]


def test_the_loss_of_prototypes_is_that_of_distances_to_class_means():
    problem = episodic_problem()
    x, _ = leaves_of(problem)
    batch = problem.data
    found = DistProtoNet().loss(problem, {"x": x}, batch, ClientContext(0, problem))
    losses = []
    for j in range(TASKS):
        z, q = (problem.features(x, (part[0][j], None)) for part in batch)
        z_scale = (z.detach().square().mean()).rsqrt()  # unit size per dimension
        for query, label in zip(q, batch.outer[1][j], strict=True):
            scores = []
            for c in range(WAYS):
                prototype = z[batch.inner[1][j] == c].mean(dim=0)
                scores.append(-((z_scale * (query - prototype)) ** 2).sum())
            losses.append(-torch.stack(scores).log_softmax(0)[label])
    truth = torch.stack(losses).mean()
    torch.testing.assert_close(found, truth)
    slopes = zip(
        torch.autograd.grad(found, list(x.values())),
        torch.autograd.grad(truth, list(x.values())),
        strict=True,
    )
    for slope, expected in slopes:
        torch.testing.assert_close(slope, expected)


def unrolled(problem, x, y, j, steps, rate, rate_x):
    """Adapt all parameters to task j with plain autograd, and keep the graph."""
    support, labels = (t[j] for t in problem.data.inner)

    def forward(w, inputs):
        z = torch.tanh(F.linear(inputs, w["x0.weight"], w["x0.bias"]))
        z = torch.tanh(F.linear(z, w["x2.weight"], w["x2.bias"]))
        return F.linear(z, w["yweight"], w["ybias"])

    w = {**{f"x{k}": v for k, v in x.items()}, **{f"y{k}": v for k, v in y.items()}}
    for _ in range(steps):
        penalty = 0.05 * (w["yweight"].square().sum() + w["ybias"].square().sum())
        loss = F.cross_entropy(forward(w, support), labels) + penalty
        slopes = torch.autograd.grad(loss, list(w.values()), create_graph=True)
        rates = {"x": rate_x, "y": rate}
        w = {k: v - rates[k[0]] * s for (k, v), s in zip(w.items(), slopes, strict=True)}
    return lambda inputs: forward(w, inputs)


@pytest.mark.parametrize("rate_x", [None, 0.2])
def test_the_outer_gradient_of_maml_goes_through_all_steps(rate_x):
    problem = episodic_problem()
    algorithm = DistMAML(adapt_steps=3, adapt_rate=0.5, adapt_rate_x=rate_x)
    how = (3, 0.5, rate_x or 0.5)
    x, y = leaves_of(problem)
    inputs = [*x.values(), *y.values()]
    seen = algorithm.seen(problem)
    found = algorithm.loss(seen, {"x": x, "y": y}, problem.data, ClientContext(0, problem))
    queries, labels = problem.data.outer
    each = [
        F.cross_entropy(unrolled(problem, x, y, j, *how)(queries[j]), labels[j])
        for j in range(TASKS)
    ]
    truth = torch.stack(each).mean()
    torch.testing.assert_close(found, truth)
    slopes = torch.autograd.grad(found, inputs)
    exact = torch.autograd.grad(truth, inputs)
    for slope, expected in zip(slopes, exact, strict=True):
        torch.testing.assert_close(slope, expected)
    scores = algorithm.predict(problem, x, y, *problem.data)
    for j in range(TASKS):
        torch.testing.assert_close(scores[j], unrolled(problem, x, y, j, *how)(queries[j]))


def gradient_by_task(problem, algorithm, x, y, batch):
    """The gradient of MAML's loss with plain autograd, one task after the other."""
    losses = []
    for j in range(len(batch.inner[0])):
        support, query = (tuple(t[j : j + 1] for t in part) for part in batch)
        w = [*x.values(), *y.values()]
        for _ in range(algorithm.adapt_steps):
            x_j = dict(zip(x, w, strict=False))
            y_j = dict(zip(y, w[len(x) :], strict=True))
            loss = problem.inner(problem.features(x_j, support), y_j, support)
            slopes = torch.autograd.grad(loss, w, create_graph=True)
            w = [v - algorithm.adapt_rate * s for v, s in zip(w, slopes, strict=True)]
        x_j, y_j = dict(zip(x, w, strict=False)), dict(zip(y, w[len(x) :], strict=True))
        losses.append(problem.outer(problem.features(x_j, query), y_j, query))
    return torch.autograd.grad(torch.stack(losses).mean(), [*x.values(), *y.values()])


NORMS = {
    "batch": nn.BatchNorm2d(3, track_running_stats=False),
    "instance": nn.InstanceNorm2d(3, affine=True),
    "layer": nn.LayerNorm([3, 4, 4]),
}


@pytest.mark.parametrize("norm", NORMS)
def test_the_outer_gradient_of_maml_goes_through_norms_of_ones_own(norm):
    layers = nn.Conv2d(1, 3, 3), NORMS[norm], nn.Tanh(), nn.Flatten(), nn.Linear(48, 5)
    draw = torch.Generator().manual_seed(0)
    parts = [
        (torch.randn(2, 4, 1, 6, 6, generator=draw).double(), torch.tensor([[0, 1, 0, 1]] * 2))
        for _ in range(2)
    ]

    def loss(z, y, data):
        return F.cross_entropy(y(z).flatten(0, 1), data[1].flatten())

    problem = rabo.Problem(
        inner=loss,
        outer=loss,
        features=lambda x, data: torch.stack([x(images) for images in data[0]]),
        x=nn.Sequential(*layers).double(),
        y=nn.Linear(5, 2).double(),
        prune="none",
        copies=2,
        ways=2,
    ).on(inner=parts[0], outer=parts[1])
    algorithm = DistMAML(adapt_steps=2, adapt_rate=0.4)
    seen = algorithm.seen(problem)
    x, y = leaves_of(problem)
    truth = gradient_by_task(seen, algorithm, x, y, problem.data)
    found = algorithm.loss(seen, {"x": x, "y": y}, problem.data, ClientContext(0, problem))
    slopes = torch.autograd.grad(found, [*x.values(), *y.values()])
    for slope, expected in zip(slopes, truth, strict=True):
        torch.testing.assert_close(slope, expected)


@pytest.mark.parametrize("backbone", ["conv4", pytest.param("resnet12", marks=pytest.mark.slow)])
def test_the_outer_gradient_of_maml_goes_through_norms_and_convolutions(backbone):
    channels = "4" if backbone == "conv4" else "2,3,3,4"
    task = FewShotTask(backbone=backbone, channels=channels, ways=2, shots=1, queries=1, tasks=2)
    client = task.build([1.0], rounds=1, seed=0, device="cpu").clients[0]
    algorithm = DistMAML(adapt_steps=2, adapt_rate=0.4)
    problem = algorithm.seen(client.problem)
    drawn = problem.batch(torch.Generator().manual_seed(0))

    def parts(dtype):
        start = [{k: v.to(dtype) for k, v in p.items()} for p in problem.start()]
        for k, v in start[1].items():  # a head of zeros has no slopes of slopes in x
            start[1][k] = torch.randn(v.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        each = [(images.to(dtype), labels) for images, labels in drawn]
        return *({k: v.requires_grad_() for k, v in p.items()} for p in start), Batch(*each)

    x, y, batch = parts(torch.float64)
    truth = gradient_by_task(problem, algorithm, x, y, batch)
    x, y, batch = parts(torch.float64)
    loss = algorithm.loss(problem, {"x": x, "y": y}, batch, ClientContext(0, problem))
    found = torch.autograd.grad(loss, [*x.values(), *y.values()])
    whole = torch.cat([t.reshape(-1) for t in truth]).norm()
    for slope, expected in zip(found, truth, strict=True):
        assert (slope - expected).norm() <= 1e-9 * (expected.norm() + 0.01 * whole)


@pytest.mark.parametrize("name", NAMES)
def test_a_round_is_a_step_along_the_mean_of_the_clients_gradients(name):
    problems = [episodic_problem(seed) for seed in range(2)]
    result = rabo.solve(
        [rabo.Client(p) for p in problems], algorithm=name, beta=0.2, num_inner_steps=1, rounds=1
    )
    algorithm = {"dist-protonet": DistProtoNet, "dist-maml": DistMAML}[name]()
    x, y = leaves_of(problems[0])
    losses = [
        algorithm.loss(algorithm.seen(p), {"x": x, "y": y}, p.data, ClientContext(0, p))
        for p in problems
    ]
    inputs = {"x": x, "y": y} if name == "dist-maml" else {"x": x}
    names = [(n, k) for n, p in inputs.items() for k in p]
    slopes = torch.autograd.grad(sum(losses) / 2, [inputs[n][k] for n, k in names])
    for (n, k), slope in zip(names, slopes, strict=True):
        moved = getattr(result, n)[k]
        torch.testing.assert_close(moved, inputs[n][k].detach() - 0.2 * slope)
    if name == "dist-protonet":
        assert all(torch.equal(v, y[k]) for k, v in result.y.items())


@pytest.mark.parametrize("name", NAMES)
def test_capacity_1_equals_the_full_model_and_a_run_goes_on_from_its_state(name):
    clients = [rabo.Client(episodic_problem(seed)) for seed in range(2)]
    options = {"algorithm": name, "num_inner_steps": 2, "momentum": 0.5}
    a = rabo.solve(clients, rounds=3, **options)
    b = rabo.solve(clients, rounds=3, policy=Full(), **options)
    first = rabo.solve(clients, rounds=2, **options)
    rest = rabo.Federation(clients, make_algorithm(options.pop("algorithm"), **options))
    rest.state = first.state
    list(rest.run(1))
    for key, value in a.x.items():
        assert torch.equal(value, b.x[key])
        assert torch.equal(value, rest.state.x[key])


class Deserted(InProcess):
    """Client 1 never answers."""

    def map(self, work, requests):
        yield from super().map(work, [r for r in requests if r.client != 1])


@pytest.mark.parametrize("name", NAMES)
def test_submodels_are_trained_too_and_a_missing_client_is_missed_by_nobody(name):
    problems = [episodic_problem(seed) for seed in range(2)]
    clients = [rabo.Client(p, 0.5) for p in problems]
    runtime = Deserted(dict(enumerate(problems)))
    options = {"algorithm": name, "policy": "importance", "rounds": 2}
    two = rabo.solve(clients, runtime=runtime, **options)
    one = rabo.solve(clients[:1], **options)
    assert all(torch.equal(v, one.x[k]) for k, v in two.x.items())
    assert one.coverage["x_trained"] < 0.6
    assert one.relative_cost["multiply_adds"] < 0.6


def test_prototypes_need_no_y_to_travel():
    clients = [rabo.Client(episodic_problem())]
    result = rabo.solve(clients, algorithm="dist-protonet", rounds=1)
    x, _ = clients[0].problem.start()
    assert result.cost.bytes_up == 8 * sum(v.numel() for v in x.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_problem_without_few_shot_tasks_is_refused(name):
    clients = [rabo.Client(curved_problem())]
    with pytest.raises(ValueError, match="it is for the task few-shot"):
        rabo.solve(clients, algorithm=name, rounds=1)
    for task in ("quadratic", "digits"):
        with pytest.raises(ValueError, match="it is for the task few-shot"):
            Experiment(task=task, algorithm=name, clients=2).federation()


@pytest.mark.parametrize(
    "options", [{"adapt_steps": 0}, {"adapt_rate": 0.0}, {"adapt_rate_x": -1.0}]
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        DistMAML(**options)


@pytest.mark.parametrize("name", NAMES)
def test_a_few_rounds_on_glyphs_teach_to_tell_new_characters_apart(name):
    """Five ways: guessing finds a fifth, and each is judged by its own way to meet a task."""
    federation, setup = Experiment(
        task="few-shot",
        task_options={
            **{"backbone": "conv4", "channels": "8", "queries": 3, "tasks": 4},
            **{"test_tasks": 30, "held_out": "validation"},
        },
        algorithm=name,
        clients=2,
        capacities="1,1/2",
        rounds=4,
        evaluate_every=4,
    ).federation()
    before = setup.evaluate(federation.state, federation.ledger)["accuracy"]
    after = list(federation.run(4))[-1].metrics["accuracy"]
    assert after > 0.6
    assert after > before + 0.08
