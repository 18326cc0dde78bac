import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rabo.files import with_statistics
from rabo.runs.experiment import Experiment, run
from rabo.seeding import stream
from rabo.tasks.loss_tuning import LossTuningTask, loss_parameters, vs_loss

ZERO = {name: torch.zeros(4) for name in ("w", "l", "delta")}


def test_the_vs_loss_starts_as_cross_entropy():
    logits, labels = torch.randn(9, 4), torch.randint(4, (9,))
    torch.testing.assert_close(vs_loss(logits, labels, ZERO), F.cross_entropy(logits, labels))


def test_the_vs_loss_is_the_formula_of_the_paper():
    x = {name: torch.randn(4, generator=stream(0, name)) for name in ("w", "l", "delta")}
    w, delta, offset = loss_parameters(x)
    assert float(w.mean()) == pytest.approx(1)
    assert bool((w > 0).all())
    logits, labels = torch.randn(9, 4, generator=stream(1)), torch.arange(9) % 4
    total = 0.0
    for f, k in zip(logits, labels, strict=True):
        shifted = (delta * f + offset).exp()
        total -= float(w[k] * (shifted[k] / shifted.sum()).log())
    assert float(vs_loss(logits, labels, x)) == pytest.approx(total / 9, rel=1e-5)


def test_statistics_are_those_of_the_training_data():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3, track_running_stats=False))
    params = {k: torch.randn(v.shape) for k, v in net.named_parameters()}
    data = torch.randn(6, 1, 4, 4)
    model = with_statistics(net, params, [data])
    image = torch.randn(1, 1, 4, 4)
    hidden = F.conv2d(data, params["0.weight"], params["0.bias"])
    mean, var = hidden.mean((0, 2, 3)), hidden.var((0, 2, 3))
    z = F.conv2d(image, params["0.weight"], params["0.bias"])
    truth = F.batch_norm(z, mean, var, params["1.weight"], params["1.bias"])
    torch.testing.assert_close(model(image), truth, rtol=1e-4, atol=1e-5)


def experiment(algorithm, **options):
    return Experiment(
        task="loss-tuning",
        task_options={"ratio": 30.0, **options},
        algorithm=algorithm,
        clients=4,
        capacities="1/2",
        rounds=60,
        evaluate_every=60,
    )


@pytest.mark.slow
def test_tuning_helps_the_rare_classes_on_digits(tmp_path):
    found = {}
    for algorithm in ("fedavg", "rabo", "rafbo"):
        result = run(experiment(algorithm), tmp_path / algorithm)
        found[algorithm] = result.metrics["balanced_accuracy"]
    assert found["rabo"] > found["fedavg"] + 0.02
    assert found["rafbo"] > found["fedavg"] + 0.02
    table = json.loads((tmp_path / "rabo" / "loss.json").read_text())
    assert set(table) >= {"w", "l", "delta", "log_prior", "accuracy_per_class"}
    summary = json.loads((tmp_path / "rabo" / "summary.json").read_text())
    assert summary["metrics"]["offset_correlation"] > 0.5  # frequent classes get larger offsets
    assert summary["metrics"]["residual"] >= 0


def test_what_is_set_aside_is_half_of_the_validation_data_and_trained_on_by_nobody():
    def parts(held_out):
        setup = LossTuningTask(held_out=held_out, ratio=10).build([1.0] * 4, 1, 0, "cpu")
        data = [client.problem.data for client in setup.clients]
        trained, tuned = (torch.cat([part[0] for part in own]) for own in zip(*data, strict=True))
        images, labels = setup.evaluate.test
        return (
            {_key(i) for i in trained},
            {_key(i) for i in tuned},
            {_key(i) for i in images},
            labels,
        )

    train, tuned, judged, labels = parts("aside")
    whole_train, whole, same, whole_labels = parts("validation")
    assert train == whole_train
    assert tuned | judged == whole == same
    assert not judged & (train | tuned)
    counts = labels.bincount(), whole_labels.bincount()
    assert bool(((counts[1] / 2 - counts[0]).abs() < 1).all())


def _key(image):
    return tuple(image.flatten().tolist())


def test_the_literal_upper_level_is_an_option():
    federation, _ = experiment("rabo", upper="literal").federation()
    assert len(list(federation.run(14))) == 14


def test_unequal_clients_train_the_entries_that_are_judged(tmp_path):
    federation, setup = experiment("fedavg").federation()
    list(federation.run(1))
    metrics = setup.evaluate(federation.state, federation.ledger)
    assert federation.ledger.summary()["y_trained"] < 0.5
    assert metrics["full_accuracy"] != metrics["balanced_accuracy"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "cifar"}, "Did you mean 'cifar10'"),
        ({"upper": "balance"}, "Did you mean 'balanced'"),
        ({"ratio": 1e6}, "lower the ratio"),
    ],
)
def test_impossible_settings_say_what_must_hold(options, message):
    with pytest.raises(ValueError, match=message):
        LossTuningTask(**options).build([0.5], 10, 0, "cpu")
