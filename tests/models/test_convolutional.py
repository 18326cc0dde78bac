"""Layouts in memory change how fast a network is, not what it computes."""

import pytest
import torch

from rabo.files import load_model, save_tensors, with_statistics
from rabo.models import convolutional
from rabo.models.convolutional import ResNet18
from rabo.models.kernels import dispatch
from rabo.models.kernels.task_batching import side_by_side
from rabo.runs.experiment import Experiment
from rabo.seeding import stream


def derivatives(net, images):
    """A loss, its gradient, and a Hessian product."""
    params = list(net.parameters())
    loss = net(images).square().mean()
    slopes = torch.autograd.grad(loss, params, create_graph=True)
    product = torch.autograd.grad(sum(s.sum() for s in slopes), params)
    return [loss, *slopes, *product]


def test_channels_last_on_a_gpu_is_the_usual_order(monkeypatch):
    torch.manual_seed(0)
    net = ResNet18(width=2).double()
    images = torch.rand(3, 3, 16, 16, dtype=torch.float64, generator=stream(0))
    with monkeypatch.context() as patch:
        patch.setattr(convolutional, "channels_last", lambda images: images)
        usual = derivatives(net, images)
    on_cpu = derivatives(net, images)
    monkeypatch.setattr(dispatch, "is_on_gpu", lambda images: True)
    on_gpu = derivatives(net, images)
    torch.testing.assert_close(on_cpu, usual, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(on_gpu, usual, rtol=1e-6, atol=1e-9)


def test_an_evaluated_model_sees_training_statistics_on_a_gpu_too(monkeypatch):
    torch.manual_seed(0)
    net = ResNet18(width=2).double()
    train, test = (
        torch.rand(n, 3, 16, 16, dtype=torch.float64, generator=stream(n)) for n in (8, 3)
    )
    params = {name: p.detach() for name, p in net.named_parameters()}
    expected = with_statistics(net, params, train.split(4))(test)
    monkeypatch.setattr(dispatch, "is_on_gpu", lambda images: True)
    found = with_statistics(net, params, train.split(4))
    torch.testing.assert_close(found(test), expected)
    alone = torch.cat([found(image) for image in test.split(1)])  # nothing of the batch is seen
    torch.testing.assert_close(alone, expected)


def test_statistics_of_its_own_are_seen_with_tasks_side_by_side_too():
    torch.manual_seed(0)
    net = convolutional.Conv4(4)
    images = torch.rand(6, 1, 16, 16, generator=stream(0))
    params = {name: p.detach() for name, p in net.named_parameters()}
    found = with_statistics(net, params, [images])
    with side_by_side(3):
        together = found(images)
    torch.testing.assert_close(together, found(images))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_statistics_have_the_type_of_the_weights_and_are_loaded_so(dtype, tmp_path):
    torch.manual_seed(0)
    net = ResNet18(width=2).to(dtype)
    images = torch.rand(4, 3, 16, 16, generator=stream(0)).to(dtype)
    params = {name: p.detach() for name, p in net.named_parameters()}
    made = with_statistics(net, params, [images])
    assert made.stem_norm.running_mean.dtype == dtype
    expected = made(images)
    save_tensors(tmp_path / "y.safetensors", made.float().state_dict(), {})
    loaded = load_model(tmp_path / "y.safetensors", net)
    assert loaded.stem_norm.running_var.dtype == dtype
    torch.testing.assert_close(loaded(images), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["dist-maml", "rabo"])
def test_transforms_do_not_ask_for_layouts(algorithm, monkeypatch):
    monkeypatch.setattr(dispatch, "is_on_gpu", lambda images: True)
    monkeypatch.setenv("RABO_KERNELS", "reference")  # as on a GPU without Triton
    options = {"backbone": "conv4", "channels": "4", "queries": 2, "tasks": 2, "test_tasks": 2}
    experiment = Experiment(
        task="few-shot",
        task_options=options,
        algorithm=algorithm,
        clients=1,
        rounds=1,
        device="cpu",
    )
    federation, _ = experiment.federation()
    assert len(list(federation.run(1))) == 1
