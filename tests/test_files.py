"""What is exported works as a plain module."""

import pytest
import torch
from torch import nn

import rabo
from rabo.files import save_tensors, with_statistics
from rabo.models.convolutional import Conv4
from rabo.models.layers import norm
from rabo.runs.experiment import Experiment, run
from rabo.tasks.loss_tuning import prepare


def small():
    return nn.Sequential(nn.Conv2d(1, 3, 3), norm(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))


def test_a_model_with_statistics_survives_the_way_through_a_file(tmp_path):
    torch.manual_seed(0)
    net = small()
    model = with_statistics(net, dict(net.named_parameters()), [torch.randn(5, 1, 4, 4)])
    save_tensors(tmp_path / "y.safetensors", model.state_dict(), {"task": "test"})
    torch.manual_seed(1)
    loaded = rabo.load_model(tmp_path / "y.safetensors", small())
    image = torch.randn(1, 1, 4, 4)
    assert torch.equal(loaded(image), model(image))
    assert torch.equal(
        loaded(torch.cat([image, image + 9]))[:1], model(image)
    )  # batches do not mix


def test_norms_without_statistics_in_the_file_go_on_with_those_of_batches(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    save_tensors(tmp_path / "x.safetensors", dict(net.named_parameters()), {})
    loaded = rabo.load_model(tmp_path / "x.safetensors", nn.Sequential(*map(type_of, net)))
    batch = 5 + torch.randn(6, 3)
    torch.testing.assert_close(loaded(batch), net.train()(batch))


def type_of(layer):
    return nn.BatchNorm1d(4) if isinstance(layer, nn.BatchNorm1d) else nn.Linear(3, 4)


def test_the_same_model_is_the_same_file(tmp_path):
    about = {str(i): "text" for i in range(20)}
    for name in ("a", "b"):
        order = reversed(about.items()) if name == "b" else about.items()
        save_tensors(tmp_path / name, {"w": torch.ones(3)}, dict(order))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_run_exports_what_was_trained_and_zeros_elsewhere(tmp_path):
    options = {"backbone": "conv4", "channels": "4", "tasks": 1, "queries": 2, "test_tasks": 1}
    experiment = Experiment(
        task="few-shot", task_options=options, clients=2, capacities="1/2", rounds=1
    )
    result = run(experiment, tmp_path / "run")
    backbone = rabo.load_model(tmp_path / "run" / "x.safetensors", Conv4(4))
    weight = dict(backbone.named_parameters())["4.weight"]
    trained = result.ledger.trained["x"]["4.weight"].expand_as(weight)
    assert torch.equal(weight, result.x["4.weight"] * trained)
    assert int((weight != 0).sum()) == 2 * 2 * 9  # half of the channels on both sides


def test_the_exported_classifier_scores_what_the_run_says(tmp_path):
    experiment = Experiment(
        task="loss-tuning",
        task_options={"dataset": "digits", "width": 4},
        clients=2,
        rounds=2,
    )
    result = run(experiment, tmp_path / "run")
    _, setup = experiment.federation()
    judge = setup.evaluate
    plain = judge.problem.definition.modules[1]
    model = rabo.load_model(tmp_path / "run" / "y.safetensors", plain)
    images, labels = judge.test
    with torch.no_grad():
        right = (model(prepare(images)).argmax(dim=1) == labels).double()
    per_class = torch.stack([right[labels == k].mean() for k in range(10)])
    assert float(per_class.mean()) == pytest.approx(result.metrics["balanced_accuracy"], abs=1e-12)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "must have 0.weight"), (b"no such thing", "not a safetensors")]
)
def test_a_file_that_does_not_fit_is_refused(tmp_path, content, message):
    path = tmp_path / "y.safetensors"
    if content is None:
        save_tensors(path, {"0.weight": torch.zeros(2)}, {})
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        rabo.load_model(path, small())
