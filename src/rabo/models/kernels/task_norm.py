"""Norm by tasks, a residual and leaky ReLU, in two passes over memory instead of five.

Kernels for channels-last images on a GPU, in Triton. The images of all tasks lie in turn, as
`side_by_side` has them: task t owns images t, t + T, t + 2T, ... Its first ones may be a set of
their own, with other statistics than the rest. A program sees one set of one task, some channels
and a share of the pixels: sums of all shares are added up where they are used.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false
# (a kernel gets some of its numbers as one tuple, and its grid in brackets)

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CHANNELS, PIXELS = 16, 256  # that a program sees at once
WARPS = 8
SHARES = 64  # of the pixels of a task, at most
PROGRAMS = 1024  # that keep a GPU busy

# numbers of which kernels are not made anew: they change from layer to layer
_PLAIN = ["sets", "first", "pixels", "tasks", "size", "share", "shares"]


def normalise(
    input: Tensor,
    beside: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    tasks: int,
    slope: float,
    eps: float,
    first: int = 0,
) -> Tensor:
    """Return leaky(norm(input) + beside), with the statistics of each task; differentiable once.

    The `first` images of each task have statistics of their own, if there are such.
    """
    images, size = len(input) // tasks, input.shape[2:].numel()
    smallest = min(first, images - first) if first else images
    if len(input) % tasks or smallest * size <= 1:
        raise ValueError(
            f"images must be a multiple of {tasks} tasks, with more than one value per channel of "
            f"a task, got shape {tuple(input.shape)} and {first} images set apart"
        )
    if beside is not None and beside.shape != input.shape:
        raise ValueError(
            f"beside must have the shape of the images, {tuple(input.shape)}, got "
            f"{tuple(beside.shape)}"
        )
    return _normalise(input, beside, weight, bias, tasks, slope, eps, first)[0]


@torch.library.custom_op(
    "rabo::normalise",
    mutates_args=(),
    schema="(Tensor input, Tensor? beside, Tensor weight, Tensor bias, int tasks, float slope, "
    "float eps, int first) -> (Tensor, Tensor, Tensor)",
)
def _normalise(
    input: Tensor,
    beside: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    tasks: int,
    slope: float,
    eps: float,
    first: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what is asked for, then means and inverse deviations by set, task and channel."""
    input, weight, bias = _last(input), weight.contiguous(), bias.contiguous()
    beside = None if beside is None else _last(beside)
    grid, numbers, sums = _plan(input, tasks, first)
    out = torch.empty_like(input)
    mean, scale = (sums.new_empty(grid[0], input.shape[1]) for _ in range(2))
    _add_up[grid](input, sums, *numbers, CHANNELS, PIXELS, num_warps=WARPS)
    _apply[grid](
        input, beside, weight, bias, sums, out, mean, scale, slope, eps, *numbers,
        beside is not None, CHANNELS, PIXELS, SHARES, num_warps=WARPS,
    )  # fmt: skip
    return out, mean, scale


@torch.library.custom_op(
    "rabo::normalise_backward",
    mutates_args=(),
    schema="(Tensor slope_out, Tensor input, Tensor? out, Tensor weight, Tensor bias, Tensor mean, "
    "Tensor scale, float slope, int tasks, int first) -> (Tensor, Tensor, Tensor)",
)
def _backward(
    slope_out: Tensor,
    input: Tensor,
    out: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    scale: Tensor,
    slope: float,
    tasks: int,
    first: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return slopes in input, in beside, and in bias and weight; `out` is given where something is
    beside.
    """
    has_beside = out is not None
    slope_out, input = _last(slope_out), _last(input)
    weight, bias = weight.contiguous(), bias.contiguous()
    grid, numbers, sums = _plan(input, tasks, first)
    into, of_beside = torch.empty_like(input), input.new_empty(0)
    if has_beside:
        of_beside = torch.empty_like(input)
    given = (slope_out, input, out, weight, bias, mean, scale)
    _add_up_slopes[grid](
        *given, sums, slope, *numbers, has_beside, CHANNELS, PIXELS, num_warps=WARPS
    )
    _apply_slopes[grid](
        *given, sums, into, of_beside, slope, *numbers,
        has_beside, CHANNELS, PIXELS, SHARES, num_warps=WARPS,
    )  # fmt: skip
    return into, of_beside, sums.reshape(-1, 2, input.shape[1]).sum(dim=0)


def _keep(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    input, beside, weight, bias, tasks, slope, _, first = inputs
    out, mean, scale = output
    kept = None if beside is None else out  # its sign; without a residual it is computed again
    ctx.save_for_backward(input, kept, weight, bias, mean, scale)
    ctx.numbers = slope, tasks, first
    ctx.set_materialize_grads(False)  # nobody asks for those of means and deviations


def _pull_back(ctx: Any, slope_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    input, out, weight, bias, mean, scale = ctx.saved_tensors
    found = _backward(slope_out, input, out, weight, bias, mean, scale, *ctx.numbers)
    into, of_beside, (of_bias, of_weight) = found
    return into, None if out is None else of_beside, of_weight, of_bias, *[None] * 4


_normalise.register_autograd(_pull_back, setup_context=_keep)


def _last(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last)


def _plan(input: Tensor, tasks: int, first: int) -> tuple[tuple[int, ...], tuple[int, ...], Tensor]:
    """Return the grid, the numbers that kernels get, and room for the sums of all shares."""
    channels, size = input.shape[1], input.shape[2] * input.shape[3]
    pixels, sets = len(input) // tasks * size, (2 if first else 1) * tasks
    first = first * size or pixels
    blocks, largest = -(-channels // CHANNELS), max(first, pixels - first)
    shares = min(SHARES, -(-PROGRAMS // (tasks * blocks)), -(-largest // PIXELS))
    share = -(-largest // (shares * PIXELS)) * PIXELS
    shares = -(-largest // share)
    sums = torch.empty(2 * shares * sets * channels, dtype=torch.float32, device=input.device)
    numbers = (sets, first, pixels, tasks, channels, size, share, shares)
    return (sets, blocks, shares), numbers, sums


@triton.jit
def _bounds(first, pixels, tasks, share):
    """Return where the pixels of a program's set begin and end, and those of its share."""
    is_first = tl.program_id(0) < tasks
    low = tl.where(is_first, 0, first)
    high = tl.where(is_first, first, pixels)
    begin = low + tl.program_id(2) * share
    return low, high, begin, tl.minimum(begin + share, high)


@triton.jit
def _place(p, t, tasks, size):
    """Return where a pixel of a task lies: the images of tasks lie in turn."""
    return ((p // size) * tasks + t) * size + p % size


@triton.jit
def _tile(start, end, t, c, tasks, channels, size, PIXELS: tl.constexpr):
    """Return which of some pixels and channels there are, and where they lie."""
    p = start + tl.arange(0, PIXELS)
    row = _place(p, t, tasks, size)
    inside = (p < end)[:, None] & (c < channels)[None, :]
    return inside, row.to(tl.int64)[:, None] * channels + c[None, :]


@triton.jit
def _load(values, at, inside):
    """Read numbers of any precision; zeros where there are none."""
    return tl.load(values + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _row(values, start, c, channels):
    """Return one number per channel, as a row, from a place on."""
    return _load(values, start + c, c < channels)[None, :]


@triton.jit
def _origin(input, low, t, c, tasks, channels, size):
    """Return the first pixel of a set, in all channels."""
    row = _place(low, t, tasks, size)
    return _row(input, row.to(tl.int64) * channels, c, channels)


@triton.jit
def _affine(weight, bias, c, channels):
    """Return weights and biases of all channels."""
    return _row(weight, 0, c, channels), _row(bias, 0, c, channels)


@triton.jit
def _save(sums, first, second, c, sets, channels):
    into = sums + (tl.program_id(2) * sets + tl.program_id(0)) * 2 * channels + c
    tl.store(into, tl.sum(first, 0), mask=c < channels)
    tl.store(into + channels, tl.sum(second, 0), mask=c < channels)


@triton.jit
def _total(sums, c, sets, channels, shares, SHARES: tl.constexpr):
    """Add up what all shares have saved."""
    s = tl.arange(0, SHARES)
    known = (s < shares)[:, None] & (c < channels)[None, :]
    at = sums + (s[:, None] * sets + tl.program_id(0)) * 2 * channels + c[None, :]
    first = tl.sum(tl.load(at, mask=known, other=0.0), 0)
    return first, tl.sum(tl.load(at + channels, mask=known, other=0.0), 0)


@triton.jit(do_not_specialize=_PLAIN)
def _add_up(
    input, sums, sets, first, pixels, tasks, channels, size, share, shares,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Add up pixels and their squares, from the first pixel of the set, which takes a large mean
    away before it is squared.
    """
    t, c = tl.program_id(0) % tasks, tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    low, _, begin, end = _bounds(first, pixels, tasks, share)
    origin = _origin(input, low, t, c, tasks, channels, size)
    one = tl.zeros([PIXELS, CHANNELS], tl.float32)
    two = tl.zeros([PIXELS, CHANNELS], tl.float32)
    for start in range(begin, end, PIXELS):
        inside, at = _tile(start, end, t, c, tasks, channels, size, PIXELS)
        value = tl.where(inside, _load(input, at, inside) - origin, 0.0)
        one += value
        two += value * value
    _save(sums, one, two, c, sets, channels)


@triton.jit(do_not_specialize=_PLAIN)
def _apply(
    input, beside, weight, bias, sums, out, mean, scale, slope, eps,
    sets, first, pixels, tasks, channels, size, share, shares,
    BESIDE: tl.constexpr, CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
    SHARES: tl.constexpr,
):  # fmt: skip
    t, c = tl.program_id(0) % tasks, tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    low, high, begin, end = _bounds(first, pixels, tasks, share)
    one, two = _total(sums, c, sets, channels, shares, SHARES)
    one, two = one / (high - low), two / (high - low)
    # NaN stays NaN: what diverges must be seen
    variance = tl.maximum(two - one * one, 0.0, propagate_nan=tl.PropagateNan.ALL)
    inverse = 1 / tl.sqrt(variance + eps)[None, :]
    centre = one[None, :] + _origin(input, low, t, c, tasks, channels, size)
    if tl.program_id(2) == 0:
        into = tl.program_id(0) * channels + c[None, :]
        tl.store(mean + into, centre, mask=(c < channels)[None, :])
        tl.store(scale + into, inverse, mask=(c < channels)[None, :])
    w, b = _affine(weight, bias, c, channels)
    for start in range(begin, end, PIXELS):
        inside, at = _tile(start, end, t, c, tasks, channels, size, PIXELS)
        unit = (_load(input, at, inside) - centre) * inverse
        value = unit * w + b
        if BESIDE:
            value += _load(beside, at, inside)
        tl.store(out + at, tl.where(value > 0, value, value * slope), mask=inside)


@triton.jit
def _arriving(slope_out, out, at, inside, unit, w, b, slope, BESIDE: tl.constexpr):
    """Return the slope that comes through leaky ReLU, whose input has the sign of its output."""
    value = _load(slope_out, at, inside)
    signed = unit * w + b
    if BESIDE:
        signed = _load(out, at, inside)
    return tl.where(signed > 0, value, value * slope)


@triton.jit(do_not_specialize=_PLAIN)
def _add_up_slopes(
    slope_out, input, out, weight, bias, mean, scale, sums, slope,
    sets, first, pixels, tasks, channels, size, share, shares,
    BESIDE: tl.constexpr, CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Add up slopes, and slopes times normalised pixels: the slopes in bias and weight."""
    t, c = tl.program_id(0) % tasks, tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    _, _, begin, end = _bounds(first, pixels, tasks, share)
    own = tl.program_id(0) * channels
    centre, inverse = _row(mean, own, c, channels), _row(scale, own, c, channels)
    w, b = _affine(weight, bias, c, channels)
    one = tl.zeros([PIXELS, CHANNELS], tl.float32)
    two = tl.zeros([PIXELS, CHANNELS], tl.float32)
    for start in range(begin, end, PIXELS):
        inside, at = _tile(start, end, t, c, tasks, channels, size, PIXELS)
        unit = (_load(input, at, inside) - centre) * inverse
        value = _arriving(slope_out, out, at, inside, unit, w, b, slope, BESIDE)
        one += value
        two += value * unit
    _save(sums, one, two, c, sets, channels)


@triton.jit(do_not_specialize=_PLAIN)
def _apply_slopes(
    slope_out, input, out, weight, bias, mean, scale, sums,
    into, of_beside, slope,
    sets, first, pixels, tasks, channels, size, share, shares,
    BESIDE: tl.constexpr, CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
    SHARES: tl.constexpr,
):  # fmt: skip
    t, c = tl.program_id(0) % tasks, tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    low, high, begin, end = _bounds(first, pixels, tasks, share)
    one, two = _total(sums, c, sets, channels, shares, SHARES)
    one, two = (one / (high - low))[None, :], (two / (high - low))[None, :]
    own = tl.program_id(0) * channels
    centre, inverse = _row(mean, own, c, channels), _row(scale, own, c, channels)
    w, b = _affine(weight, bias, c, channels)
    for start in range(begin, end, PIXELS):
        inside, at = _tile(start, end, t, c, tasks, channels, size, PIXELS)
        unit = (_load(input, at, inside) - centre) * inverse
        value = _arriving(slope_out, out, at, inside, unit, w, b, slope, BESIDE)
        if BESIDE:
            tl.store(of_beside + at, value, mask=inside)
        tl.store(into + at, w * inverse * (value - one - unit * two), mask=inside)
