"""Triton's interpreter runs the kernels of a GPU on a CPU; its compiler needs no GPU either."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from rabo.models import layers
from rabo.models.convolutional import Conv4, ResNet12
from rabo.models.kernels import dispatch
from rabo.models.kernels.task_batching import side_by_side

triton = pytest.importorskip("triton")

COMPILE = """
from itertools import product
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from rabo.models.kernels import narrow_convolution, task_norm

FLOATS = ("slope", "eps")
COUNTS = ("sets", "first", "pixels", "tasks", "channels", "size", "share", "shares", "height")
COUNTS += ("width", "out", "of_in", "of_out")

def check(module, name, images, floats, numbers={}, **fixed):
    kernel = getattr(module, name)
    fixed = {p: fixed.get(p, getattr(module, p, None)) for p in kernel.arg_names if p.isupper()}
    for precision in ("*fp32", "*bf16") if images else ("*fp32",):
        types = {p: precision if p in images else "*fp32" for p in kernel.arg_names}
        types |= {p: "fp32" for p in types if p in floats}
        types |= {p: "i32" for p in types if p in COUNTS and p not in images}
        known = {p: v for p, v in {**fixed, **numbers}.items() if p in types}
        types |= dict.fromkeys(known, "constexpr")
        source = ASTSource(kernel, types, {(list(types).index(p),): v for p, v in known.items()})
        options = {"num_warps": module.WARPS, "num_stages": fixed.get("STAGES", 1)}
        made = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert made.asm["cubin"], name
        assert made.metadata.shared <= 227 * 1024, (name, fixed)

IMAGES = ("input", "beside", "out", "slope_out", "into", "of_beside")
for name in ("_add_up", "_apply", "_add_up_slopes", "_apply_slopes"):
    for beside in (True, False) if "BESIDE" in getattr(task_norm, name).arg_names else (True,):
        check(task_norm, name, IMAGES, FLOATS, BESIDE=beside)
# numbers that are one are known when a kernel is compiled
for size, channels in product((1, 3), ({}, {"channels": 1})):
    given = ("images", "slope", "found"), (), channels
    check(narrow_convolution, "_weights", *given, SIZE=size)
    for back in (True, False):
        check(narrow_convolution, "_windows", *given, BACK=back, SIZE=size)
"""


IMAGE = torch.rand(1, 1, 28, 28)


def reference(images, beside, weight, bias, tasks, slope, eps, first=0):
    if first:  # of each task, which lie in turn
        sets = [slice(None, first * tasks), slice(first * tasks, None)]
        besides = [None if beside is None else beside[s] for s in sets]
        given = [(images[s], b) for s, b in zip(sets, besides, strict=True)]
        return torch.cat([reference(*g, weight, bias, tasks, slope, eps) for g in given])
    shape = (len(images) // tasks, tasks * images.shape[1], *images.shape[2:])
    weight, bias = weight.repeat(tasks), bias.repeat(tasks)
    out = F.batch_norm(images.reshape(shape), None, None, weight, bias, True, 0.0, eps)
    out = out.reshape(images.shape)
    return F.leaky_relu(out if beside is None else out + beside, slope)


@pytest.mark.slow
@pytest.mark.parametrize("slope", [1.0, 0.1])
@pytest.mark.parametrize("has_beside", [False, True])
@pytest.mark.parametrize(
    ("shape", "tasks", "first"),
    [
        ((12, 5, 6, 6), 4, 0),
        ((4, 3, 3, 3), 2, 0),
        ((20, 17, 3, 3), 4, 0),
        ((6, 40, 1, 1), 2, 0),
        ((12, 5, 6, 6), 4, 1),
        ((14, 17, 3, 3), 2, 5),
    ],
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_fused_norm_and_its_slopes_are_those_of_the_layers(
    shape, tasks, first, has_beside, slope, layout, generator
):
    from rabo.models.kernels.task_norm import normalise

    draw = torch.randn(*shape, generator=generator), torch.randn(*shape, generator=generator)
    images, beside = ((3 + 2 * t).contiguous(memory_format=layout) for t in draw)
    weight, bias = torch.rand(shape[1], generator=generator) + 0.5, torch.randn(shape[1])
    given = [images, beside, weight, bias] if has_beside else [images, weight, bias]

    def apply(function, dtype):
        leaves = [t.to(dtype).detach().requires_grad_() for t in given]
        between = leaves[1] if has_beside else None
        out = function(leaves[0], between, *leaves[-2:], tasks, slope, 1e-5, first)
        towards = torch.cos(torch.arange(out.numel(), dtype=dtype)).reshape(shape)
        return [out, *torch.autograd.grad(out, leaves, towards)]

    for found, true in zip(
        apply(normalise, torch.float32), apply(reference, torch.float64), strict=True
    ):
        torch.testing.assert_close(found.double(), true, rtol=1e-4, atol=1e-4)


def test_images_in_bfloat16_have_statistics_in_float32(generator):
    from rabo.models.kernels.task_norm import normalise

    images, beside = (3 + 2 * torch.randn(2, 60, 3, 4, 4, generator=generator)).bfloat16()
    weight = torch.rand(3, generator=generator) + 0.5
    bias = torch.randn(3, generator=generator)

    def apply(function, dtype):
        # the numbers that are given are the same: only what is computed with them is not
        leaves = [t.to(dtype).requires_grad_() for t in (images, beside)]
        leaves += [
            t.to(torch.promote_types(dtype, t.dtype)).requires_grad_() for t in (weight, bias)
        ]
        out = function(*leaves, 2, 0.1, 1e-5)
        towards = torch.cos(torch.arange(out.numel()).reshape(out.shape)).bfloat16().to(dtype)
        return [out, *torch.autograd.grad(out, leaves, towards)]

    found, true = apply(normalise, torch.bfloat16), apply(reference, torch.float64)
    assert [t.dtype for t in found] == [torch.bfloat16] * 3 + [torch.float32] * 2
    for f, t in zip(found[:3], true[:3], strict=True):
        torch.testing.assert_close(f.double(), t, rtol=2**-7, atol=2**-7)  # its last digit
    for f, t in zip(found[3:], true[3:], strict=True):  # sums over all images
        # which side of the kink an activation lies on is seen in the digits that are left of it
        torch.testing.assert_close(f.double(), t, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("first", [0, 1, 4])
def test_many_pixels_are_seen_share_by_share_and_tile_by_tile(first, monkeypatch, generator):
    from rabo.models.kernels import task_norm

    monkeypatch.setattr(task_norm, "PIXELS", 8)
    monkeypatch.setattr(task_norm, "SHARES", 4)  # of 45 pixels: two tiles each
    images = torch.randn(10, 3, 3, 3, generator=generator).requires_grad_()
    ones, zeros = torch.ones(3), torch.zeros(3)
    towards = torch.cos(torch.arange(images.numel(), dtype=torch.float32)).reshape(images.shape)
    found, true = (
        [out, *torch.autograd.grad(out, [images], towards)]
        for out in (
            f(images, None, ones, zeros, 2, 0.1, 1e-5, first)
            for f in (task_norm.normalise, reference)
        )
    )
    for a, b in zip(found, true, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, which is numpy
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, 1e25])
def test_what_is_not_finite_stays_so(wrong):
    from rabo.models.kernels.task_norm import normalise

    images = torch.rand(4, 2, 3, 3)
    images[1, 0, 1, 1] = wrong
    out = normalise(images, None, torch.ones(2), torch.zeros(2), 2, 0.1, 1e-5)
    assert not out[1::2, 0].isfinite().all()
    assert out[::2].isfinite().all(), "the other task has nothing to do with it"


@pytest.mark.parametrize("shape", [(5, 3, 2, 2), (0, 3, 2, 2), (2, 3, 1, 1)])
def test_images_that_do_not_fit_the_tasks_are_refused(shape):
    from rabo.models.kernels.task_norm import normalise

    with pytest.raises(ValueError, match="multiple of 2 tasks"):
        normalise(torch.rand(shape), None, torch.ones(3), torch.ones(3), 2, 1.0, 1e-5)


@pytest.mark.parametrize(("number", "first"), [(4, 1), (6, 2), (6, 3)])
def test_a_set_apart_must_have_statistics_too(number, first):
    from rabo.models.kernels.task_norm import normalise

    images = torch.rand(number, 3, 1, 1)
    with pytest.raises(ValueError, match=f"{first} images set apart"):
        normalise(images, None, torch.ones(3), torch.ones(3), 2, 1.0, 1e-5, first)


def test_what_is_beside_must_have_the_shape_of_the_images():
    from rabo.models.kernels.task_norm import normalise

    images, ones = torch.rand(4, 3, 2, 2), torch.ones(3)
    with pytest.raises(ValueError, match="beside must have the shape"):
        normalise(images, torch.rand(4, 3, 1, 1), ones, ones, 2, 1.0, 1e-5)


def test_where_kernels_do_not_run_the_usual_layers_are_used_and_it_is_said(monkeypatch):
    from rabo.models.kernels import task_norm

    def fail(*_):
        raise RuntimeError("no compiler")

    run, here = dispatch._kernels_run, torch.device("cpu")
    run.cache_clear()
    assert run(here, "")
    run.cache_clear()
    monkeypatch.setattr(task_norm, "normalise", fail)
    with pytest.warns(UserWarning, match=r"do not run here \(RuntimeError: no compiler\)"):
        assert not run(here, "")
    run.cache_clear()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.func, in itself
def test_derivatives_that_kernels_do_not_have_take_the_usual_layers():
    seen = []

    def watch(t):
        seen.append(dispatch.is_transformed())
        return t.sum()

    watch(torch.ones(2))
    torch.func.grad(watch)(torch.ones(2))
    torch.func.jvp(watch, (torch.ones(2),), (torch.ones(2),))
    torch.func.vmap(watch)(torch.ones(2, 2))
    with torch.autograd.forward_ad.dual_level():
        watch(torch.ones(2))
    assert seen == [False, True, True, True, True]


def test_a_large_mean_does_not_swallow_the_variance(generator):
    from rabo.models.kernels.task_norm import normalise

    images = 1000 + torch.rand(8, 3, 5, 5, generator=generator)
    ones, zeros = torch.ones(3), torch.zeros(3)
    found = normalise(images, None, ones, zeros, 2, 1.0, 1e-5)
    true = reference(images.double(), None, ones.double(), zeros.double(), 2, 1.0, 1e-5)
    torch.testing.assert_close(found.double(), true, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize(
    ("make", "size"), [(lambda: ResNet12((3, 5, 6, 7)), 8), (lambda: Conv4(5), 16)]
)
def test_a_backbone_with_kernels_is_the_one_without(make, size, first, monkeypatch, generator):
    torch.manual_seed(3)
    backbone, tasks = make(), 2
    images = torch.rand(tasks * 6, 1, size, size, generator=generator)

    def found(has_kernels):
        monkeypatch.setattr(dispatch, "has_kernels", lambda _: has_kernels)
        with side_by_side(tasks, first):
            z = backbone(images)
        loss = (z * torch.cos(torch.arange(z.numel()).reshape(z.shape))).sum()
        slopes = torch.autograd.grad(loss, list(backbone.parameters()))
        for slope, p in zip(slopes, backbone.parameters(), strict=True):
            assert slope.stride() == p.stride()  # else steps on lists are one kernel per tensor
        return [z.detach(), *slopes]

    for fast, plain in zip(found(True), found(False), strict=True):
        # rounding may decide which side of a kink an activation lies on: noise of 1e-5 in the
        # images changes gradients by 2e-3
        assert (fast - plain).norm() <= 1e-2 * plain.norm()


@pytest.mark.slow
def test_a_wide_backbone_with_kernels_is_the_one_without_to_the_digits_of_bfloat16(
    monkeypatch, generator
):
    torch.manual_seed(3)
    backbone, tasks = Conv4(layers.WIDE), 2
    images = torch.rand(tasks * 20, 1, 16, 16, generator=generator)

    def found(has_kernels):
        monkeypatch.setattr(dispatch, "has_kernels", lambda _: has_kernels)
        with side_by_side(tasks):
            z = backbone(images)
        [slope] = torch.autograd.grad(z.square().sum(), [backbone[8].weight])
        return z, slope

    for fast, plain in zip(found(True), found(False), strict=True):
        assert fast.dtype == torch.float32
        assert 1e-4 < (fast - plain).norm() / plain.norm() < 0.2, "eight digits, over four layers"


@pytest.mark.parametrize(("setting", "wide"), [("", torch.bfloat16), ("float32", torch.float32)])
def test_wide_backbones_multiply_in_bfloat16_unless_asked_not_to(setting, wide, monkeypatch):
    monkeypatch.setenv("RABO_KERNELS", setting)
    assert Conv4(layers.WIDE)._precision(IMAGE) == wide
    assert Conv4(layers.WIDE - 1)._precision(IMAGE) == torch.float32


def test_kernels_that_there_are_not_are_refused(monkeypatch):
    monkeypatch.setenv("RABO_KERNELS", "fast")
    with pytest.raises(ValueError, match="must be reference or float32, or not set, got 'fast'"):
        Conv4(layers.WIDE)._precision(IMAGE)


def test_kernels_are_for_tasks_side_by_side_on_a_gpu(monkeypatch):
    images = torch.rand(4, 1, 28, 28)
    with side_by_side(2):
        assert not dispatch.has_kernels(images)
    monkeypatch.setattr(dispatch, "is_on_gpu", lambda images: True)
    with side_by_side(1):
        assert not dispatch.has_kernels(images)
    with side_by_side(2):
        assert dispatch.has_kernels(images)
        assert not dispatch.has_kernels(images.double())
        monkeypatch.setenv("RABO_KERNELS", "reference")
        assert not dispatch.has_kernels(images)


def test_a_second_derivative_through_a_kernel_is_refused():
    from rabo.models.kernels.task_norm import normalise

    images = torch.rand(4, 3, 2, 2, requires_grad=True)
    out = normalise(images, None, torch.ones(3), torch.zeros(3), 2, 0.1, 1e-5)
    [slope] = torch.autograd.grad(out.square().sum(), images, create_graph=True)
    with pytest.raises(RuntimeError, match="autograd formula"):
        torch.autograd.grad(slope.sum(), images)


@pytest.mark.slow
def test_kernels_compile_for_a_gpu(tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    del environment["TRITON_INTERPRET"]
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
