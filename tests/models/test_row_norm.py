"""Batch norm of few channels on a CPU is the usual one."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from rabo.models.convolutional import Conv4
from rabo.models.kernels import row_norm
from rabo.models.layers import norm


def slopes(function, images, weight, bias, dtype):
    leaves = [t.to(dtype).detach().requires_grad_() for t in (images, weight, bias)]
    out = function(*leaves)
    towards = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).reshape(out.shape)
    return [out, *torch.autograd.grad(out, leaves, towards.to(dtype))]


def usual(images, weight, bias):
    return F.batch_norm(images, None, None, weight, bias, True, 0.0, 1e-5)


def fast(images, weight, bias):
    return row_norm.normalise(images, weight, bias, 1e-5)


@settings(deadline=None)
@given(
    number=st.integers(2, 9),
    channels=st.integers(1, 20),
    height=st.integers(1, 6),
    width=st.integers(1, 6),
    mean=st.sampled_from([0.0, 3.0, 1000.0]),
    last=st.booleans(),
)
def test_it_is_the_usual_norm_with_its_slopes(number, channels, height, width, mean, last):
    draw = torch.Generator().manual_seed(0)
    images = mean + torch.randn(number, channels, height, width, generator=draw)
    if last:
        images = images.contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(2, channels, generator=draw)
    exact = slopes(usual, images, weight, bias, torch.float64)
    for f, t in zip(slopes(fast, images, weight, bias, torch.float64), exact, strict=True):
        torch.testing.assert_close(f, t, rtol=1e-8, atol=1e-8)
    tolerance = 1e-3 if mean < 10 else 0.1  # of numbers that have three digits left
    for f, t in zip(slopes(fast, images, weight, bias, torch.float32), exact, strict=True):
        # two images of nearly one value: slopes are differences of what nearly cancels
        assert (f.double() - t).norm() <= tolerance * (1 + t.norm())


def test_second_derivatives_are_those_of_the_usual_norm(generator):
    images = torch.randn(4, 3, 2, 2, generator=generator, dtype=torch.float64)
    weight, bias = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    found = []
    for function in (fast, usual):
        leaves = [t.clone().requires_grad_() for t in (images, weight, bias)]
        out = function(*leaves).square().sum()
        first = torch.autograd.grad(out, leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(t.square().sum() for t in first), leaves))
    for f, t in zip(*found, strict=True):
        torch.testing.assert_close(f, t)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_derivatives_where_something_is_frozen(frozen, generator):
    images = torch.randn(4, 3, 2, 2, generator=generator, dtype=torch.float64)
    weight, bias = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    found = []
    for function in (fast, usual):
        given = [t.clone() for t in (images, weight, bias)]
        leaves = [t.requires_grad_() for i, t in enumerate(given) if i != frozen]
        out = function(*given).square().sum()
        plain = torch.autograd.grad(out, leaves, retain_graph=True)
        first = torch.autograd.grad(out, leaves, create_graph=True)
        second = torch.autograd.grad(sum(t.square().sum() for t in first), leaves)
        found.append([*plain, *first, *second])
    for f, t in zip(*found, strict=True):
        torch.testing.assert_close(f, t)


def test_a_graph_of_any_number_of_images_can_be_exported():
    images = torch.rand(60, 1, 28, 28)
    batch = torch.export.Dim("batch", min=2, max=256)
    made = torch.export.export(Conv4(4), (images,), dynamic_shapes=({0: batch},))
    assert made.module()(images[:7]).shape[0] == 7


@pytest.mark.parametrize(
    ("channels", "pays"),
    [(1, False), (4, True), (7, True), (10, True), (8, False), (16, False), (64, False)],
)
def test_it_is_for_few_channels_of_many_pixels(channels, pays, monkeypatch):
    images = torch.rand(60, channels, 28, 28).contiguous(memory_format=torch.channels_last)
    assert row_norm.pays(images) is pays
    assert not row_norm.pays(images[:1])
    assert not row_norm.pays(images.contiguous())
    seen = []
    monkeypatch.setattr(row_norm, "normalise", lambda i, *_: seen.append(1) or i)
    norm(channels)(images)
    assert bool(seen) is pays


def test_a_backbone_is_what_it_was(monkeypatch, generator):
    torch.manual_seed(3)
    backbone = Conv4(5)
    images = torch.rand(60, 1, 28, 28, generator=generator)
    found = []
    for is_on in (True, False):
        if not is_on:
            monkeypatch.setattr(row_norm, "pays", lambda _: False)
        z = backbone(images)
        found.append([z, *torch.autograd.grad(z.square().sum(), list(backbone.parameters()))])
    for fast, plain in zip(*found, strict=True):
        # rounding may decide which of two nearly equal pixels is the largest
        assert (fast - plain).norm() <= 1e-3 * plain.norm()
