"""HeteroFL against a plain torch loop, and the options of its released code by hand."""

from dataclasses import replace
from math import ceil

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import rabo
from rabo.algorithms import ALGORITHMS
from rabo.cli import app
from rabo.exchange.rows import counted
from rabo.execution import InProcess, Recorded
from rabo.federation.solve import make_algorithm
from rabo.runs.experiment import Experiment, resume, run
from rabo.seeding import stream
from rabo.tree import leaves

WIDTHS, CLASSES, RATE, STEPS, ROUNDS = (1.0, 0.5, 0.25, 0.5), 5, 0.05, 4, 3
LABELS = ((0, 1), (1, 2), (0, 1, 2), (2, 3))  # nobody has class 4
EXTRAS = {
    "clip_gradients": 0.5,
    "weight_decay": 0.05,
    "mask_logits": "zero",
    "average_by_label": True,
}


def network(width=1.0):
    a, b = ceil(4 * width), ceil(8 * width)
    return nn.Sequential(
        nn.Conv2d(1, a, 3, 1, 1),
        nn.BatchNorm2d(a, track_running_stats=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(a, b, 3, 1, 1),
        nn.BatchNorm2d(b, track_running_stats=False),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(b, CLASSES),
    ).double()


def data_of(client):
    g = stream(3, client)
    labels = torch.tensor(LABELS[client])[torch.randint(len(LABELS[client]), (12,), generator=g)]
    labels[: len(LABELS[client])] = torch.tensor(LABELS[client])
    return torch.randn(12, 1, 8, 8, generator=g).double(), labels


def start():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return network()


def released_round(weights, extras):
    """Slice the first channels, train with torch.optim, average by count; in place."""
    total = {k: torch.zeros_like(v) for k, v in weights.items()}
    count = {k: torch.zeros_like(v) for k, v in weights.items()}
    for client, width in enumerate(WIDTHS):
        model = network(width)
        own = {k: tuple(map(slice, v.shape)) for k, v in model.state_dict().items()}
        model.load_state_dict({k: weights[k][s] for k, s in own.items()})
        decay = extras.get("weight_decay", 0.0)
        sgd = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=decay)
        images, labels = data_of(client)
        absent = torch.ones(CLASSES, dtype=torch.bool)
        absent[labels] = False
        for _ in range(STEPS):
            sgd.zero_grad()
            logits = model(images)
            if extras.get("mask_logits") == "zero":
                logits = logits.masked_fill(absent, 0)
            F.cross_entropy(logits, labels).backward()
            if "clip_gradients" in extras:
                nn.utils.clip_grad_norm_(model.parameters(), extras["clip_gradients"])
            sgd.step()
        for k, v in model.state_dict().items():
            rows = slice(None)
            if k.startswith("9.") and extras.get("average_by_label"):
                rows = labels.unique()
            total[k][own[k]][rows] += v[rows]
            count[k][own[k]][rows] += 1
    for k, v in weights.items():
        weights[k] = torch.where(count[k] > 0, total[k] / count[k].clamp(min=1), v)


def solved(split, runtime=None, rounds=ROUNDS, **extras):
    """With the network cut into x and y, or as y alone."""
    model = start()
    x, y = (model[:9], model[9]) if split else ({}, model)
    problem = rabo.Problem(
        loss=lambda x, y, data: F.cross_entropy(y(x(data[0]) if split else data[0]), data[1]),
        x=x,
        y=y,
        example=data_of(0)[0],
        labels=lambda data: data[1],
    )
    clients = [rabo.Client(problem.on(data_of(i)), width) for i, width in enumerate(WIDTHS)]
    problems = {i: c.problem for i, c in enumerate(clients)}
    options = {"beta": RATE, "momentum": 0.9, "num_inner_steps": STEPS, **extras}
    return rabo.solve(
        clients,
        algorithm="heterofl",
        rounds=rounds,
        runtime=runtime and runtime(problems),
        **options,
    )


@pytest.mark.parametrize("split", [True, False], ids=["x and y", "y alone"])
@pytest.mark.parametrize(
    "extras", [{}, EXTRAS, *({k: v} for k, v in EXTRAS.items())], ids=lambda e: "+".join(e)
)
def test_rounds_are_those_of_a_plain_torch_loop(split, extras):
    weights = start().state_dict()
    for _ in range(ROUNDS):
        released_round(weights, extras)
    result = solved(split, **extras)
    found = list(map(leaves, (result.x, result.y)))
    for value, truth in zip(found[0] + found[1], weights.values(), strict=True):
        torch.testing.assert_close(value, truth, rtol=0, atol=1e-10)


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_option_changes_the_run(extra):
    plain, other = solved(True), solved(True, **{extra: EXTRAS[extra]})
    assert any(
        not torch.allclose(a, b, atol=1e-4)
        for a, b in zip(leaves(plain.y), leaves(other.y), strict=True)
    )


def test_recorded_work_gives_the_same_bits_with_all_options():
    plain, recorded = solved(True, **EXTRAS), solved(True, Recorded, **EXTRAS)
    for a, b in zip(leaves((plain.x, plain.y)), leaves((recorded.x, recorded.y)), strict=True):
        assert torch.equal(a, b)


def softmax_clients(num_classes=4):
    """Two clients of softmax regression, with labels {0, 1} and {1, 2}."""
    g = stream(5)
    y = {"weight": torch.randn(num_classes, 3, generator=g), "bias": torch.zeros(num_classes)}
    module = nn.Linear(3, num_classes)
    module.load_state_dict(y)
    problem = rabo.Problem(
        loss=lambda x, y, data: F.cross_entropy(y(data[0]), data[1]),
        y=module.double(),
        prune="none",
        labels=lambda data: data[1],
    )
    parts = [
        (torch.randn(6, 3, generator=g).double(), torch.tensor([a, b, a, b, b, a]))
        for a, b in ((0, 1), (1, 2))
    ]
    return problem, parts


def step_of(y, part, how):
    """One step of size 1 on softmax regression, with the slope (p − onehot)ᵀz/n by hand."""
    z, labels = part
    logits = z @ y["weight"].mT + y["bias"]
    absent = torch.ones(len(y["bias"]), dtype=torch.bool)
    absent[labels] = False
    if how != "none":
        logits[:, absent] = {"zero": 0.0, "exclude": -torch.inf}[how]
    slope = (logits.softmax(dim=1) - F.one_hot(labels, len(y["bias"]))) / len(z)
    if how != "none":
        slope[:, absent] = 0
    return {"weight": y["weight"] - slope.mT @ z, "bias": y["bias"] - slope.sum(dim=0)}


@pytest.mark.parametrize("how", ["none", "zero", "exclude"])
@pytest.mark.parametrize("aggregate", ["mean", "median"])
def test_a_row_of_the_classifier_is_the_mean_of_those_who_have_the_label(how, aggregate):
    problem, parts = softmax_clients()
    clients = [rabo.Client(problem.on(part)) for part in parts]
    options = {"mask_logits": how, "average_by_label": True, "beta": 1.0, "num_inner_steps": 1}
    result = rabo.solve(
        clients, algorithm="fedavg", rounds=1, aggregate=rabo.Aggregate(aggregate), **options
    )
    start = clients[0].problem.start()[1]
    one, two = (step_of(start, part, how) for part in parts)
    for name, value in result.y.items():
        torch.testing.assert_close(value[0], one[name][0])
        torch.testing.assert_close(value[1], (one[name][1] + two[name][1]) / 2)
        torch.testing.assert_close(value[2], two[name][2])
        assert torch.equal(value[3], start[name][3])
    assert result.coverage["y_trained"] == 3 / 4  # the record knows too
    assert result.coverage["y_min"] == 1


def test_the_numbers_of_rows_are_counted_as_traffic():
    problem, parts = softmax_clients()
    clients = [rabo.Client(problem.on(part)) for part in parts]
    plain, by_label = (
        rabo.solve(clients, algorithm="fedavg", rounds=1, average_by_label=wished).cost
        for wished in (False, True)
    )
    assert by_label.bytes_up - plain.bytes_up == 2 * 2 * 2 * 4  # clients, tensors, labels, int32
    assert by_label.bytes_down == plain.bytes_down


def test_excluded_labels_change_nothing_for_a_client_that_has_them_all():
    problem, _ = softmax_clients()
    part = torch.randn(8, 3, generator=stream(1)).double(), torch.arange(4).repeat(2)
    found = [
        rabo.solve([rabo.Client(problem.on(part))], algorithm="fedavg", rounds=2, mask_logits=how).y
        for how in ("none", "zero", "exclude")
    ]
    for other in found[1:]:
        assert all(torch.equal(found[0][k], other[k]) for k in other)


def test_class_rows_name_the_classifier_of_a_tree():
    g = stream(2)
    problem = rabo.Problem(
        loss=lambda x, y, data: F.cross_entropy(data[0] @ y["w"].mT, data[1]),
        y={"w": torch.randn(3, 2, generator=g), "other": torch.zeros(3)},
        labels=lambda data: data[1],
        class_rows=("w",),
    )
    own = problem.on((torch.randn(4, 2, generator=g), torch.tensor([0, 2, 2, 0])))
    assert own.label_rows() == {"w": (0, 2)}
    result = rabo.solve([rabo.Client(own)], algorithm="fedavg", rounds=2, average_by_label=True)
    assert torch.equal(result.y["w"][1], problem.y["w"][1])
    assert not torch.equal(result.y["w"][0], problem.y["w"][0])


def flat_loss(x, y, data):
    return F.cross_entropy(y(data[0]), data[1])


def by_hand(x, y, data):
    return F.cross_entropy(data[0] @ y.weight.mT, data[1])


def small(loss=flat_loss, y=None, labels=lambda data: data[1], data=None, **options):
    y = nn.Linear(3, 4) if y is None else y
    problem = rabo.Problem(loss=loss, y=y, prune="none", labels=labels, **options)
    data = (torch.zeros(2, 3), torch.tensor([0, 1])) if data is None else data
    return [rabo.Client(problem.on(data))]


@pytest.mark.parametrize(
    ("clients", "options", "message"),
    [
        (lambda: small(labels=None), {"mask_logits": "zero"}, "give Problem.labels="),
        (lambda: small(labels=None), {"average_by_label": True}, "give Problem.labels="),
        (lambda: small(labels=lambda d: d[0]), {}, "tensor of whole numbers, got torch.float32"),
        (
            lambda: small(data=(torch.zeros(1, 3), torch.tensor([4]))),
            {},
            r"labels must lie in 0\.\.3",
        ),
        (
            lambda: small(class_rows=("head",)),
            {},
            "must name tensors of y .weight, bias., got 'head'",
        ),
        (lambda: small(y={"w": torch.ones(4, 3)}), {}, "give class_rows="),
        (lambda: small(y=nn.Conv1d(3, 4, 1)), {}, "give class_rows="),
        (
            lambda: small(y={"w": torch.ones(4, 3), "b": torch.ones(3)}, class_rows=("w", "b")),
            {},
            "one row per class, got",
        ),
        (
            lambda: small(y={"weight": torch.ones(4, 3)}, class_rows=("weight",), loss=by_hand),
            {"mask_logits": "zero"},
            "y must be a module",
        ),
        (lambda: small(loss=by_hand), {"mask_logits": "zero"}, "does not call y"),
        (
            lambda: small(y=nn.Sequential(nn.Linear(3, 4), nn.Flatten(0))),
            {"mask_logits": "zero"},
            r"one logit per class \(4\)",
        ),
    ],
)
def test_what_labels_cannot_be_known_or_masked_is_refused(clients, options, message):
    with pytest.raises((ValueError, rabo.ClientError), match=message):
        rabo.solve(clients(), algorithm="fedavg", rounds=1, **options)


def test_rows_that_are_cut_are_refused():
    y = {"w": torch.ones(4, 3)}
    problem = rabo.Problem(
        loss=lambda x, y, data: y["w"].square().sum(),
        y=y,
        axes={"y.w": ("classes", None)},
        labels=lambda data: data,
        class_rows=("w",),
    )
    client = rabo.Client(problem.on(torch.tensor([1])), 0.5)
    with pytest.raises(rabo.ClientError, match="do not cut classes"):
        rabo.solve([client], algorithm="static", rounds=1, average_by_label=True)


@pytest.mark.parametrize("rows", [{"x": {"w": (0,)}}, {"y": {"v": (0,)}}, {"y": {"bias": (4,)}}])
def test_the_server_refuses_rows_that_there_are_not(rows):
    problem, parts = softmax_clients()

    class Lying(InProcess):
        def map(self, work, requests):
            for reply in super().map(work, requests):
                yield replace(reply, rows=rows)

    own = problem.on(parts[0])
    with pytest.raises(rabo.ClientError, match="its rows"):
        rabo.solve([rabo.Client(own)], algorithm="fedavg", rounds=1, runtime=Lying({0: own}))


def whole_of(own):
    x, y = own.start()
    return rabo.Full()(
        rabo.pruning.policies.Whole(own.channels, x, y), 1.0, 0, 0, torch.Generator()
    )


def test_rows_that_do_not_count_are_held_by_nobody():
    problem, parts = softmax_clients()
    whole = whole_of(problem.on(parts[0])).y
    part = counted(whole, {"bias": (0, 3)})
    assert part.held()["bias"].tolist() == [1, 0, 0, 1]
    assert part.held()["weight"].all()
    assert part.num_entries() == 12 + 2
    assert counted(whole, {}) is whole


def test_a_client_without_labels_leaves_the_classifier_alone():
    problem, _ = softmax_clients()
    nothing = torch.zeros(0, 3).double(), torch.zeros(0, dtype=torch.long)
    own = problem.on(nothing)
    assert own.label_rows() == {"weight": (), "bias": ()}
    assert counted(whole_of(own).y, own.label_rows()).num_entries() == 0


def test_heterofl_is_another_name_of_static_and_listed_once():
    assert make_algorithm("heterofl") == make_algorithm("static")
    assert "heterofl" not in ALGORITHMS
    built = [Experiment(task="digits", algorithm=a).build()[1] for a in ("heterofl", "static")]
    assert built[0] == built[1]  # also in what the task suggests


def test_the_command_line_knows_heterofl(tmp_path):
    call = CliRunner().invoke
    shown = call(app, ["algorithms", "heterofl"])
    assert shown.exit_code == 0
    assert "average_by_label" in shown.output
    small = ["--clients", "2", "--rounds", "1", "--width", "8", "--quiet", "--out"]
    where = str(tmp_path / "run")
    ran = call(app, ["run", "digits", "--algorithm", "heterofl", *small, where])
    assert ran.exit_code == 0
    asked = ["compare", "digits", "--algorithms", "rabo,heterofl", "--seeds", "1"]
    compared = call(app, [*asked, "--levels", "y", *small, str(tmp_path / "compared")])
    assert compared.exit_code == 0
    assert (tmp_path / "compared/heterofl/seed-0/summary.json").exists()


@pytest.mark.parametrize(("task", "width"), [("digits", 8), ("loss-tuning", 4)])
def test_tasks_with_classes_know_the_labels_of_their_clients(task, width, tmp_path):
    setup, _ = Experiment(task=task, task_options={"width": width}, clients=2).build()
    for client in setup.clients:
        labels = torch.cat([part[1] for part in client.problem.data]).unique().tolist()
        rows = client.problem.label_rows()
        assert {tuple(labels)} == set(rows.values())
        assert {client.problem.start()[1][name].shape[0] for name in rows} == {10}
    experiment = Experiment(
        task=task,
        task_options={"width": width},
        algorithm="static",
        algorithm_options={**EXTRAS, "num_inner_steps": 2},
        clients=2,
        rounds=1,
    )
    assert run(experiment, tmp_path / "run").metrics["training_loss"] > 0


OWN = """
import torch
import torch.nn.functional as F
from torch import nn
import rabo

torch.manual_seed(0)
problem_of_all = rabo.Problem(
    loss=lambda x, y, data: F.cross_entropy(y(x(data[0])), data[1]),
    x=nn.Sequential(nn.Linear(4, 8), nn.Tanh()),
    y=nn.Linear(8, 4),
    example=torch.zeros(2, 4),
    labels=lambda data: data[1],
    batch_size=5,
)

def problem(partition, num_partitions):
    g = torch.Generator().manual_seed(partition)
    labels = torch.randint(2, (9,), generator=g) + partition
    return problem_of_all.on((torch.randn(9, 4, generator=g), labels))
"""


def test_a_problem_file_of_one_loss_trains_both_levels_and_resumes_to_the_same_bits(tmp_path):
    (tmp_path / "problem.py").write_text(OWN)

    def experiment(rounds):
        return Experiment(
            task="own",
            task_options={"file": str(tmp_path / "problem.py")},
            algorithm="heterofl",
            algorithm_options=EXTRAS,
            clients=3,
            capacities="1,1/2",
            rounds=rounds,
        )

    whole = run(experiment(4), tmp_path / "whole")
    run(experiment(2), tmp_path / "halves")
    rest = resume(experiment(4), tmp_path / "halves")
    for a, b in zip(leaves((whole.x, whole.y)), leaves((rest.x, rest.y)), strict=True):
        assert torch.equal(a, b)
    assert whole.coverage["x_trained"] == 1.0
    assert whole.history[0].metrics.keys() == {"training_loss", "beta", "outer_loss"}
