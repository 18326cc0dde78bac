import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rabo
from known_problems import networks
from rabo.pruning.policies import Random, Whole

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


def test_training_mode_does_not_change_what_is_found():
    x, _, _ = NETWORKS["mlp"]
    reference = dict(bound("mlp").channels.units)
    x.train()
    assert dict(bound("mlp").channels.units) == reference
    assert x.training


def test_modules_without_an_example_say_what_to_give():
    x, y, example = NETWORKS["mlp"]
    problem = rabo.Problem(inner=lambda *_: 0, outer=lambda *_: 0, x=x, y=y)
    with pytest.raises(ValueError, match="needs example="):
        _ = problem.on(inner=example, outer=example).channels


class PartlyWhole(nn.Module):
    """A concatenation of which one half cannot be cut."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 6), nn.Linear(4, 6), nn.LayerNorm(6)
        self.out = nn.Linear(12, 2)

    def forward(self, z):
        return self.out(torch.cat([F.relu(self.a(z)), self.norm(self.b(z))], dim=1))


@pytest.mark.parametrize("net", [PartlyWhole(), *(y for x, y, _ in NETWORKS.values() if x is None)])
def test_every_network_that_is_accepted_can_be_trained_at_half_width(net):
    shape = {"PartlyWhole": (4,), "ResNet18": (3, 32, 32), "SmallViT": (1, 28, 28)}
    example = torch.randn(6, *shape.get(type(net).__name__, (1, 12, 12)))

    def loss(x, y, data):
        return y(data).square().mean() + x["a"].exp().sum() * 1e-3

    problem = rabo.Problem(inner=loss, outer=loss, x={"a": torch.zeros(1)}, y=net, example=example)
    own = problem.on(inner=example, outer=example)
    options = {"algorithm": "fedavg", "policy": "importance", "beta": 1e-3, "rounds": 1}
    result = rabo.solve([rabo.Client(own, 0.5)], **options)
    assert 0 < result.coverage["y_trained"] < 1


class ZeroHead(nn.Module):
    """A layer that mixes channels behind a head that starts from zero."""

    def __init__(self):
        super().__init__()
        self.a, self.out = nn.Linear(4, 6), nn.Linear(6, 2)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, z):
        z = self.a(z)
        return self.out(z / (z.abs().mean(dim=1, keepdim=True) + 1))


def test_a_head_that_starts_from_zero_hides_nothing():
    example = torch.randn(5, 4)
    problem = rabo.Problem(
        inner=lambda *_: 0,
        outer=lambda *_: 0,
        x={"a": torch.ones(1)},
        y=ZeroHead(),
        example=example,
    )
    with pytest.raises(rabo.UnsupportedModelError, match=r"layer y\.a"):
        _ = problem.on(inner=example, outer=example).channels


def test_axes_declared_by_hand_are_checked_too():
    example = torch.randn(5, 4)
    axes = {"y.a.weight": ("h", None), "y.a.bias": ("h",), "y.b.weight": (None, "h")}
    problem = rabo.Problem(
        inner=lambda *_: 0,
        outer=lambda *_: 0,
        x={"a": torch.ones(1)},
        y=ChannelMean(),
        example=example,
        axes=axes,
    )
    with pytest.raises(rabo.UnsupportedModelError, match="layer h"):
        _ = problem.on(inner=example, outer=example).channels


def weighting(**options):
    """x weighs the losses of examples, y classifies them: not a chain."""
    x = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1), nn.Sigmoid())
    y = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def inner(weigh, net, data):
        losses = F.cross_entropy(net(data[0]), data[1], reduction="none")
        penalty = 0.1 * sum(w.square().sum() for w in net.values())
        return (weigh(losses.detach()[:, None])[:, 0] * losses).mean() + penalty

    def outer(weigh, net, data):
        return F.cross_entropy(net(data[0]), data[1])

    data = torch.randn(20, 4), torch.randint(3, (20,))
    problem = rabo.Problem(inner=inner, outer=outer, x=x, y=y, **options)
    return problem.on(inner=data, outer=data)


def test_modules_that_are_not_a_chain_are_traced_one_by_one():
    own = weighting(example={"x": torch.randn(5, 1), "y": torch.randn(5, 4)})
    assert dict(own.channels.units) == {"x.0": 6, "y.0": 8}
    result = rabo.solve([rabo.Client(own, 0.5)], rounds=2)
    assert 0 < result.coverage["x_trained"] < 1
    only_y = weighting(example={"y": torch.randn(5, 4)})
    assert dict(only_y.channels.units) == {"y.0": 8}


def test_an_example_that_does_not_fit_says_what_to_give():
    with pytest.raises(rabo.UnsupportedModelError, match="are not applied one after the other"):
        _ = weighting(example=torch.randn(5, 1)).channels
