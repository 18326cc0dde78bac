"""Layers of tasks with weights of their own: Triton's interpreter runs them on a CPU."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

from rabo.exchange.cost import measure
from rabo.models import choice

triton = pytest.importorskip("triton")
tl = triton.language

SHAPES = st.tuples(*[st.integers(1, 5)] * 6)


@triton.jit
def product(a, b, total):  # the interpreter multiplies the bits of bfloat16
    return tl.dot(a.to(tl.float32), b.to(tl.float32), total)


def usual_convolution(images, weight):
    return F.conv2d(images, weight, padding=weight.shape[2] // 2)


def usual_norm(images, beside, weight, bias, slope, eps):
    # by the definition: torch's own has wrong slopes of slopes under vmap
    mean, variance = images.mean((0, 2, 3)), images.var((0, 2, 3), correction=0)
    affine = weight * (variance + eps).rsqrt()
    out = (images - mean[:, None, None]) * affine[:, None, None] + bias[:, None, None]
    return F.leaky_relu(out if beside is None else out + beside, slope)


def wave(like):
    return torch.cos(torch.arange(like.numel(), dtype=like.dtype)).reshape(like.shape)


def two_orders(layer, tensors, dtype):
    """What a layer gives for every task, its slopes, and the slopes of a sum of those."""
    leaves = [t.to(dtype).detach().requires_grad_() for t in tensors]
    out = vmap(layer)(*leaves)
    first = torch.autograd.grad(out, leaves, wave(out.detach()), create_graph=True)
    # a square, so that what is differentiated twice depends on the slopes too
    total = sum((f.square() * (2 + wave(f.detach()))).sum() for f in first)
    second = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    return [out, *first, *second]


def assert_equal(found, true, close=1e-4):
    for f, t in zip(found, true, strict=True):
        assert f.shape == t.shape
        assert (f.double() - t).norm() <= close * (1 + t.norm())


@settings(max_examples=15)
@given(shape=SHAPES, size=st.sampled_from([1, 3]))
def test_a_convolution_has_the_slopes_of_the_usual_one_to_second_order(shape, size):
    from rabo.models.adapted import convolve

    tasks, number, channels, out, height, width = shape
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(tasks, number, channels, height, width, generator=draw)
    weight = torch.randn(tasks, out, channels, size, size, generator=draw)
    found = two_orders(convolve, [images, weight], torch.float32)
    assert_equal(found, two_orders(usual_convolution, [images, weight], torch.float64))


@pytest.mark.parametrize(("channels", "out"), [(4, 8), (8, 20), (20, 8), (5, 7)])
def test_tiles_may_be_smaller_than_channels_and_pixels(channels, out, monkeypatch, generator):
    from rabo.models.adapted import convolution

    for name, tile in {"PIXELS": 16, "DEPTH": 4, "WIDTH": 16, "SUMMED": 16}.items():
        monkeypatch.setattr(convolution, name, tile)
    images = torch.randn(2, 3, channels, 4, 4, generator=generator)
    weight = torch.randn(2, out, channels, 3, 3, generator=generator)
    found = two_orders(convolution.convolve, [images, weight], torch.float32)
    assert_equal(found, two_orders(usual_convolution, [images, weight], torch.float64))


@pytest.mark.parametrize("slope", [1.0, 0.1])
@pytest.mark.parametrize("has_beside", [False, True])
@pytest.mark.parametrize("shape", [(3, 4, 5, 4, 4), (2, 3, 17, 3, 3), (1, 7, 2, 9, 9)])
def test_a_norm_has_the_slopes_of_the_usual_one_to_second_order(
    shape, has_beside, slope, generator
):
    from rabo.models.adapted import normalise

    images, beside = (torch.randn(shape, generator=generator) for _ in range(2))
    weight = 0.5 + torch.rand(shape[0], shape[2], generator=generator)
    bias = torch.randn(shape[0], shape[2], generator=generator)

    def layer(function):
        if has_beside:
            return lambda i, w, b, near: function(2 + 3 * i, near, w, b, slope, 1e-5)
        return lambda i, w, b: function(2 + 3 * i, None, w, b, slope, 1e-5)

    tensors = [images, weight, bias, *([beside] if has_beside else [])]
    found = two_orders(layer(normalise), tensors, torch.float32)
    assert_equal(found, two_orders(layer(usual_norm), tensors, torch.float64))


def adapted_loss(convolution, norm, dtype):
    """A loss after two steps of tasks that begin with the same weights, and its slopes."""
    draw = torch.Generator().manual_seed(1)
    start = [torch.randn(3, 2, 3, 3, generator=draw), *torch.rand(2, 3, generator=draw)]
    start = [t.to(dtype).requires_grad_() for t in start]
    support, query = torch.randn(2, 2, 4, 2, 5, 5, generator=draw).to(dtype)

    def loss(w, images):
        return norm(convolution(images, w[0]), None, w[1], w[2], 0.1, 1e-5).square().sin().mean()

    def of_task(own, others):
        w = list(start)
        for _ in range(2):
            w = [v - 0.3 * s for v, s in zip(w, grad(loss)(w, own), strict=True)]
        return loss(w, others)

    found = vmap(of_task)(support, query)
    return [found, *torch.autograd.grad(found.sum(), start)]


def test_slopes_go_through_steps_of_every_task():
    from rabo.models.adapted import convolve, normalise

    found = adapted_loss(convolve, normalise, torch.float32)
    assert_equal(found, adapted_loss(usual_convolution, usual_norm, torch.float64))
    plain = adapted_loss(usual_convolution, usual_norm, torch.float32)
    assert not torch.equal(found[1], plain[1])  # else it has been compared with itself


def test_the_same_multiply_adds_are_counted():
    from rabo.models.adapted import convolve, normalise

    own = measure(lambda: adapted_loss(convolve, normalise, torch.float32))[1]
    usual = measure(lambda: adapted_loss(usual_convolution, usual_norm, torch.float32))[1]
    # torch asks for slopes of images, which nobody needs: of one convolution in a step
    assert own.multiply_adds == 10 * 10_800
    assert usual.multiply_adds == 12 * 10_800


def test_slopes_of_weights_are_of_products_in_bfloat16_where_channels_fill_a_tile(
    monkeypatch, generator
):
    from rabo.models.adapted import convolution

    monkeypatch.setattr(convolution, "_product", product)
    for channels, is_half in ((5, False), (32, True), (64, True)):
        images = torch.randn(2, 3, channels, 2, 2, generator=generator)
        slope = torch.randn(2, 3, 4, 2, 2, generator=generator)
        plain, half = (convolution._sums(slope, images, 3, half) for half in (False, True))
        error = (half - plain).norm() / plain.norm()
        assert 1e-3 < error < 1e-2 if is_half else error == 0
        weight = torch.zeros(2, 4, channels, 3, 3, dtype=torch.float64, requires_grad=True)
        out = vmap(usual_convolution)(images.double(), weight)
        [true] = torch.autograd.grad(out, weight, slope.double())
        assert_equal([plain], [true])


def test_what_does_not_fit_is_refused():
    from rabo.models.adapted import convolve, normalise

    images, ones = torch.rand(2, 3, 4, 4), torch.ones(3)
    for shape in ((4, 2, 3, 3), (4, 3, 2, 2), (4, 3, 3, 1)):
        with pytest.raises(ValueError, match="3 input channels, as the images, and a square"):
            convolve(images, torch.rand(shape))
    with pytest.raises(ValueError, match=r"must be in float32, got torch\.float64"):
        convolve(images.double(), torch.rand(4, 3, 3, 3))
    with pytest.raises(ValueError, match="more than one value per channel"):
        normalise(images[:1, :, :1, :1], None, ones, ones, 0.1, 1e-5)
    with pytest.raises(ValueError, match="beside must have the shape of the images"):
        normalise(images, images[:, :, :1, :1], ones, ones, 0.1, 1e-5)


def test_a_third_derivative_is_refused(generator):
    from rabo.models.adapted import normalise

    images = torch.randn(2, 3, 2, 2, generator=generator).requires_grad_()
    slope = normalise(images, None, torch.ones(3), torch.zeros(3), 0.1, 1e-5).square().sum()
    for _ in range(2):
        [slope] = torch.autograd.grad(slope.sum(), images, create_graph=True)
    with pytest.raises(NotImplementedError, match="RABO_KERNELS=reference"):
        torch.autograd.grad(slope.sum(), images)


def test_sums_of_several_tiles_and_shares(monkeypatch, generator):
    from rabo.models import kernels
    from rabo.models.adapted import normalise

    for name, number in {"PIXELS": 4, "CHANNELS": 2, "SHARES": 4, "PROGRAMS": 16}.items():
        monkeypatch.setattr(kernels, name, number)
    monkeypatch.setattr("rabo.models.adapted.normalisation.CHANNELS", 2)
    tensors = [torch.randn(2, 3, 3, 4, 4, generator=generator), *torch.rand(2, 2, 3)]
    found = two_orders(lambda i, w, b: normalise(i, None, w, b, 0.1, 1e-5), tensors, torch.float32)
    exact = lambda i, w, b: usual_norm(i, None, w, b, 0.1, 1e-5)  # noqa: E731
    assert_equal(found, two_orders(exact, tensors, torch.float64))


def used(transform, images):
    """Whether layers have kernels of tasks while a transform is under way."""
    seen = []

    def look(t):
        seen.append(choice.adapts(t))
        return t.square().sum()

    transform(look)(images)
    return any(seen)


def forwards(look):
    def work(images):
        with forward_ad.dual_level():
            return vmap(look)(images)

    return work


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.func, in itself
def test_kernels_are_for_tasks_and_derivatives_backwards(monkeypatch):
    images = torch.rand(2, 3, 1, 4, 4)
    assert not used(vmap, images)  # not on a GPU
    monkeypatch.setattr(choice, "is_on_gpu", lambda images: True)
    choice._kernels_run.cache_clear()
    assert used(vmap, images)
    assert used(lambda f: vmap(grad(f)), images)
    assert used(lambda f: grad(lambda t: vmap(f)(t).sum()), images)
    assert not used(lambda f: f, images)
    assert not used(grad, images)
    assert not used(lambda f: vmap(lambda t: jvp(f, (t,), (t,))[1]), images)
    assert not used(forwards, images)
    assert not used(vmap, images.double())
    monkeypatch.setenv("RABO_KERNELS", "reference")
    assert not used(vmap, images)
    monkeypatch.delenv("RABO_KERNELS")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert not used(vmap, images)
    choice._kernels_run.cache_clear()
