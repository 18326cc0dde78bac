import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rabo
from problems import networks
from rabo.masks import Random, Whole

NETWORKS = networks()


def bound(name: str):
    x, y, example = NETWORKS[name]

    def loss(a, b, data):
        return (b(a(data)) if x is not None else b(data)).square().mean()

    problem = rabo.Problem(
        inner=loss,
        outer=loss,
        x=x if x is not None else {"scale": torch.ones(1)},
        y=y,
        example=example,
    )
    return problem.on(inner=example, outer=example)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("width", [0.5, 0.25])
def test_a_compact_submodel_computes_what_the_masked_model_computes(name, width, generator):
    problem = bound(name)
    x, y = problem.start()
    parts = Random()(Whole(problem.channels, x, y), width, 0, 0, generator)
    small_x, small_y = parts.x.extract(x), parts.y.extract(y)
    small = problem.restrict(parts).inner(small_x, small_y, problem.data.inner)
    masked = problem.inner(parts.x.expand(small_x), parts.y.expand(small_y), problem.data.inner)
    torch.testing.assert_close(small, masked, rtol=1e-5, atol=1e-6)
    assert parts.x.num_entries() + parts.y.num_entries() < sum(
        v.numel() for v in {**x, **y}.values()
    )


@pytest.mark.parametrize("name", ["mlp", "conv4-flatten", "resnet12"])
def test_gradients_of_a_compact_submodel_are_those_of_the_masked_model(name, generator):
    problem = bound(name)
    x, y = problem.start()
    parts = Random()(Whole(problem.channels, x, y), 0.5, 0, 0, generator)
    small = {k: v.requires_grad_() for k, v in parts.x.extract(x).items()}
    loss = problem.restrict(parts).inner(small, parts.y.extract(y), problem.data.inner)
    compact = torch.autograd.grad(loss, list(small.values()))
    full = {k: v.clone().requires_grad_() for k, v in parts.x.expand(parts.x.extract(x)).items()}
    y_masked = parts.y.expand(parts.y.extract(y))
    masked = torch.autograd.grad(
        problem.inner(full, y_masked, problem.data.inner), list(full.values())
    )
    for a, b in zip(
        compact, parts.x.extract(dict(zip(full, masked, strict=True))).values(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_a_residual_stream_is_one_group_and_joins_backbone_and_head():
    problem = bound("resnet12")
    assert problem.channels.units["x.3.shortcut"] == 64
    assert (problem.channels.axes["y.weight"][1] >= 0).all()
    assert "output" in problem.channels.whole["y"]


def test_attention_is_cut_by_heads_and_its_norms_are_kept_whole():
    units, whole = bound("vit").channels.units, bound("vit").channels.whole
    assert units["y.blocks.0.attention.qkv"] == 4
    assert units["y.blocks.0.up"] == 64
    assert any("normalises over channels" in why for why in whole.values())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, z):
        return self.b(F.relu(self.a(z)))


class RawParameter(nn.Module):
    """A parameter used with F.linear: its input side is not followed."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.raw = nn.Parameter(torch.randn(8, 6))
        self.last = nn.Linear(8, 2)

    def forward(self, z):
        return self.last(F.relu(F.linear(F.relu(self.first(z)), self.raw)))


class UntakenBranch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.never = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, z):
        return self.a(z) if len(z) > 0 else self.never(z)


class FixedShape(nn.Module):
    """A forward pass that writes its width down as a number."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, z):
        return self.b(self.a(z).reshape(-1, 6))


class HiddenNoGrad(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, z):
        with torch.no_grad():
            z = self.a(z)
        return self.b(z)


class ChannelMean(nn.Module):
    """A mean over channels: zeros count in the masked model and not in the compact one."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, z):
        z = self.a(z)
        return self.b(z - z.mean(dim=1, keepdim=True))


@pytest.mark.parametrize(
    ("net", "layer"),
    [
        (Tied(), "b.weight are tied"),
        (RawParameter(), "layer y"),
        (UntakenBranch(), "layer y.never"),
        (FixedShape(), "layer y.a"),
        (HiddenNoGrad(), "layer y.a"),
        (ChannelMean(), "layer y.a"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_network_that_cannot_be_cut_is_refused_by_the_name_of_its_layer(net, layer):
    example = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))

    def loss(x, y, data):
        return y(data).square().mean()

    problem = rabo.Problem(inner=loss, outer=loss, x={"a": torch.ones(1)}, y=net, example=example)
    with pytest.raises(rabo.UnsupportedModelError, match=layer):
        _ = problem.on(inner=example, outer=example).channels


def test_frozen_parameters_and_training_mode_do_not_change_what_is_found():
    x, _, _ = NETWORKS["mlp"]
    reference = dict(bound("mlp").channels.units)
    x.requires_grad_(False)
    x.train()
    try:
        assert dict(bound("mlp").channels.units) == reference
        assert x.training
    finally:
        x.requires_grad_(True)


def test_modules_without_an_example_say_what_to_give():
    x, y, example = NETWORKS["mlp"]
    problem = rabo.Problem(inner=lambda *_: 0, outer=lambda *_: 0, x=x, y=y)
    with pytest.raises(ValueError, match="needs example="):
        _ = problem.on(inner=example, outer=example).channels
