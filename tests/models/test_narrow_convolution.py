"""Convolutions of few channels: Triton's interpreter runs them on a CPU."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from rabo.exchange.cost import measure
from rabo.models.kernels import dispatch
from rabo.models.layers import Convolution

triton = pytest.importorskip("triton")
tl, divided = (
    triton.language,
    importlib.import_module("rabo.models.kernels.narrow_convolution")._divided,
)


@triton.jit
def divide(quotients, rests, by, N: tl.constexpr):
    n = tl.arange(0, N)
    quotient, rest = divided(n, by)
    tl.store(quotients + n, quotient)
    tl.store(rests + n, rest)


CLOSE = {"rtol": 2**-7, "atol": 2**-5}  # the digits of bfloat16
SHAPES = st.tuples(
    st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)
)


def slopes(function, images, weight, dtype):
    """What a convolution gives, then its slopes towards some direction."""
    leaves = [t.to(dtype).detach().requires_grad_() for t in (images, weight)]
    out = function(*leaves)
    towards = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).reshape(out.shape)
    return [out, *torch.autograd.grad(out, leaves, towards.to(out.dtype))]


def usual(images, weight):
    return F.conv2d(images, weight, padding=weight.shape[2] // 2)


@settings(deadline=None)
@given(shape=SHAPES, size=st.sampled_from([1, 3, 5]), layout=st.booleans())
def test_it_is_the_usual_convolution_with_its_slopes(shape, size, layout):
    from rabo.models.kernels.narrow_convolution import convolve

    number, channels, out, height, width = shape
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(number, channels, height, width, generator=draw)
    if layout:
        images = images.contiguous(memory_format=torch.channels_last)
    weight = torch.randn(out, channels, size, size, generator=draw)
    found = slopes(convolve, images, weight, torch.float32)
    for f, t in zip(found, slopes(usual, images, weight, torch.float64), strict=True):
        torch.testing.assert_close(f.double(), t, rtol=1e-4, atol=1e-4)


def test_channels_and_pixels_beyond_a_tile_are_seen_tile_by_tile(monkeypatch, generator):
    from rabo.models.kernels import narrow_convolution

    monkeypatch.setattr(narrow_convolution, "PIXELS", 16)
    monkeypatch.setattr(narrow_convolution, "PROGRAMS", 8)  # shares of more than a tile
    images = torch.randn(3, 20, 5, 5, generator=generator)
    weight = torch.randn(40, 20, 3, 3, generator=generator)
    found = slopes(narrow_convolution.convolve, images, weight, torch.float32)
    for f, t in zip(found, slopes(usual, images, weight, torch.float64), strict=True):
        torch.testing.assert_close(f.double(), t, rtol=1e-4, atol=1e-3)


def test_images_in_bfloat16_have_weights_in_float32(generator):
    from rabo.models.kernels.narrow_convolution import convolve

    images = torch.randn(4, 1, 6, 6, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(5, 1, 3, 3, generator=generator).requires_grad_()
    out = convolve(images, weight)
    into, of_weight = torch.autograd.grad(out.float().square().sum(), [images, weight])
    assert [t.dtype for t in (out, into, of_weight)] == [torch.bfloat16] * 2 + [torch.float32]
    leaves = [t.detach().double().requires_grad_() for t in (images, weight)]
    exact = usual(*leaves)
    torch.testing.assert_close(out.double(), exact, rtol=2**-7, atol=2**-7)
    towards = 2 * out.detach().double()
    for found, true in zip(
        (into, of_weight), torch.autograd.grad(exact, leaves, towards), strict=True
    ):
        assert (found.double() - true).norm() <= 2**-7 * true.norm()
    assert of_weight.stride() == weight.stride()  # else steps on lists are one kernel per tensor


def test_numbers_are_divided_exactly():
    numbers = torch.arange(2**13, dtype=torch.int32)
    for by in (1, 2, 3, 7, 28, 29, 84, 97, 640, 2047):
        quotients, rests = torch.empty_like(numbers), torch.empty_like(numbers)
        divide[(1,)](quotients, rests, by, N=len(numbers))
        assert torch.equal(quotients, numbers // by)
        assert torch.equal(rests, numbers % by)


@pytest.mark.parametrize("shape", [(4, 2, 3, 3), (4, 3, 2, 2), (4, 3, 3, 1)])
def test_weights_that_do_not_fit_are_refused(shape):
    from rabo.models.kernels.narrow_convolution import convolve

    with pytest.raises(ValueError, match="3 input channels, as the images, and a square window"):
        convolve(torch.rand(2, 3, 4, 4), torch.rand(shape))


def test_precisions_that_kernels_do_not_have_are_refused():
    from rabo.models.kernels.narrow_convolution import convolve

    with pytest.raises(ValueError, match=r"float32 or bfloat16, got torch.float64"):
        convolve(torch.rand(2, 3, 4, 4).double(), torch.rand(2, 3, 3, 3).double())


def test_weights_may_be_in_the_precision_of_the_images_and_images_none(generator):
    from rabo.models.kernels.narrow_convolution import convolve

    images = torch.randn(2, 3, 4, 4, generator=generator).bfloat16()
    weight = torch.randn(5, 3, 3, 3, generator=generator).bfloat16()
    found = convolve(images, weight)
    torch.testing.assert_close(found.float(), usual(images.float(), weight.float()), **CLOSE)
    none = images[:0].clone().requires_grad_()
    leaf = weight.clone().requires_grad_()
    into, of_weight = torch.autograd.grad(convolve(none, leaf).sum(), [none, leaf])
    assert into.shape == none.shape
    assert not of_weight.any()


def test_a_second_derivative_is_refused():
    from rabo.models.kernels.narrow_convolution import convolve

    images = torch.rand(2, 3, 4, 4, requires_grad=True)
    weight = torch.rand(2, 3, 3, 3, requires_grad=True)
    [slope] = torch.autograd.grad(
        convolve(images, weight).square().sum(), weight, create_graph=True
    )
    with pytest.raises(RuntimeError, match="autograd formula"):
        torch.autograd.grad(slope.sum(), weight)


def test_it_costs_what_the_usual_convolution_costs(generator):
    from rabo.models.kernels.narrow_convolution import convolve

    images = torch.randn(4, 3, 6, 6, generator=generator)
    weight = torch.randn(5, 3, 3, 3, generator=generator)
    spent = [
        measure(lambda f=f: slopes(f, images, weight, torch.float32))[1].multiply_adds
        for f in (convolve, usual)
    ]
    assert spent[0] == spent[1] == 3 * 4 * 36 * 5 * 3 * 9


@pytest.mark.parametrize(
    ("channels", "out", "dtype", "is_narrow"),
    [
        (1, 64, torch.bfloat16, True),
        (16, 32, torch.float32, True),
        (16, 16, torch.bfloat16, False),
        (32, 32, torch.float32, False),
    ],
)
def test_few_channels_have_kernels_of_their_own(channels, out, dtype, is_narrow, monkeypatch):
    from rabo.models.kernels import narrow_convolution

    seen = []
    monkeypatch.setattr(dispatch, "has_kernels", lambda _: True)
    monkeypatch.setattr(
        narrow_convolution, "convolve", lambda i, w: seen.append(1) or usual(i, w.to(i.dtype))
    )
    Convolution(channels, out, 3)(torch.rand(2, channels, 4, 4, dtype=dtype))
    assert bool(seen) is is_narrow
    images = torch.rand(2, 1, 4, 4)
    assert not Convolution(1, 2, 3, stride=2)._is_narrow(images)
    assert not Convolution(1, 2, 2)._is_narrow(images)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert not Convolution(1, 2, 3)._is_narrow(images)
