"""Convolutions of few channels, channels-last, on a GPU, in Triton.

The usual libraries have tiles for many channels: of a few they leave most of a tile empty. Here a
program sees some pixels and, for one row of the window at a time, the values of its columns and
channels, which lie side by side in memory: three columns of five channels fill a tile of sixteen.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false
# (a kernel gets its grid in brackets)

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

PIXELS, WARPS, STAGES = 128, 4, 1  # that a program sees at once, and how it works
DEPTH, WIDTH = 16, 32  # of a tile of weights, at most
PROGRAMS = 1024  # that keep a GPU busy with the slopes of weights

FAR = tl.constexpr(-(1 << 20))  # above every image

# numbers of which kernels are not made anew: they change from layer to layer
_PLAIN = ["pixels", "height", "width", "share", "of_in", "of_out"]


def convolve(input: Tensor, weight: Tensor) -> Tensor:
    """Return the convolution with a square window of odd size, as large as the images.

    Differentiable once. Images may be in bfloat16; products are of float32 (TF32 on a GPU).
    """
    channels, size = weight.shape[1], weight.shape[2]
    if input.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"images must be in float32 or bfloat16, got {input.dtype}")
    if input.shape[1] != channels or weight.shape[2:] != (size, size) or size % 2 == 0:
        raise ValueError(
            f"weights must have {input.shape[1]} input channels, as the images, and a square "
            f"window of odd size, got shape {tuple(weight.shape)}"
        )
    return _convolve(input, weight)


@torch.library.custom_op(
    "rabo::convolve", mutates_args=(), schema="(Tensor input, Tensor weight) -> Tensor"
)
def _convolve(input: Tensor, weight: Tensor) -> Tensor:
    return _window(input, weight, is_back=False)


@torch.library.custom_op(
    "rabo::convolve_back", mutates_args=(), schema="(Tensor slope, Tensor weight) -> Tensor"
)
def _back(slope: Tensor, weight: Tensor) -> Tensor:
    """Return the slopes of the input: a convolution with the window turned around."""
    return _window(slope, weight, is_back=True)


@torch.library.custom_op(
    "rabo::convolve_weight",
    mutates_args=(),
    schema="(Tensor slope, Tensor input, Tensor weight) -> Tensor",
)
def _of_weight(slope: Tensor, input: Tensor, weight: Tensor) -> Tensor:
    """Return the slopes of the weights: sums over shares of the pixels, then over all shares."""
    slope, input = _last(slope), _last(input)
    (out, channels, size), (height, width) = weight.shape[:3], input.shape[2:]
    pixels, depth, across = _numbers(input, size * channels, out)
    tiles = size * triton.cdiv(size * channels, depth) * triton.cdiv(out, across)
    share = triton.cdiv(pixels, max(1, PROGRAMS // tiles))
    share = max(1, triton.cdiv(share, PIXELS)) * PIXELS
    shares = triton.cdiv(pixels, share)
    sums = torch.empty((shares, *weight.shape), dtype=torch.float32, device=input.device)
    grid = (shares, size * triton.cdiv(size * channels, depth), triton.cdiv(out, across))
    _weights[grid](
        input, slope, sums, pixels, height, width, channels, out, share,
        size, depth, across, PIXELS, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return sums.sum(dim=0).to(weight.dtype)


def _window(input: Tensor, weight: Tensor, is_back: bool) -> Tensor:
    input, weight = _last(input), weight.contiguous()
    (out, channels), size = weight.shape[:2], weight.shape[2]
    of_out, of_in = channels * size**2, size**2
    if is_back:
        out, channels, of_out, of_in = channels, out, of_in, of_out
    (number, _, height, width) = input.shape
    found = torch.empty(
        (number, out, height, width),
        dtype=input.dtype,
        device=input.device,
        memory_format=torch.channels_last,
    )
    pixels, depth, across = _numbers(input, size * channels, out)
    grid = (triton.cdiv(pixels, PIXELS), triton.cdiv(out, across))
    _windows[grid](
        input, weight, found, pixels, height, width, channels, out, of_in, of_out,
        is_back, size, depth, across, PIXELS, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return found


def _numbers(input: Tensor, depth: int, out: int) -> tuple[int, int, int]:
    """Return the number of pixels, and how deep and wide tiles of weights are."""
    tiles = (max(16, triton.next_power_of_2(n)) for n in (depth, out))
    depth, across = (min(n, most) for n, most in zip(tiles, (DEPTH, WIDTH), strict=True))
    return len(input) * input.shape[2] * input.shape[3], depth, across


def _keep(ctx: Any, inputs: Sequence[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _pull_back(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor | None]:
    input, weight = ctx.saved_tensors
    of_input, of_weight = ctx.needs_input_grad
    return (
        _back(slope, weight) if of_input else None,
        _of_weight(slope, input, weight) if of_weight else None,
    )


_convolve.register_autograd(_pull_back, setup_context=_keep)


@register_flop_formula(
    [torch.ops.rabo.convolve, torch.ops.rabo.convolve_back, torch.ops.rabo.convolve_weight]
)
def _flops(first: Sequence[int], *rest: Sequence[int], **_: Any) -> int:
    """Count as a convolution is counted elsewhere: window and weights, for every pixel."""
    number, _channels, height, width = first
    out, channels, size, _size = rest[-1]
    return 2 * number * height * width * out * channels * size**2


def _last(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last)


@triton.jit
def _divided(number, by):
    """Return quotient and remainder of small numbers; processors of a GPU divide no integers.

    They are right for all images of up to 2,047 by 2,047 pixels.
    """
    quotient = ((number + 0.5) * (1.0 / by)).to(tl.int32)
    return quotient, number - quotient * by


@triton.jit
def _places(start, pixels, height, width, PIXELS: tl.constexpr):
    """Return some pixels, and the line and column of each in its image; those of none are far."""
    p = start + tl.arange(0, PIXELS)
    line, column = _divided(start % (height * width) + tl.arange(0, PIXELS), width)
    _, line = _divided(line, height)
    return p, tl.where(p < pixels, line, FAR), column


@triton.jit
def _seen(images, p, line, column, k, dc, dr, height, width, channels, SIZE: tl.constexpr):
    """Return what some pixels see in a row of the window: its columns and channels side by side."""
    there = column[:, None] + dc[None, :]
    inside = (line + dr >= 0) & (line + dr < height)
    inside = inside[:, None] & (there >= 0) & (there < width)
    first = (p + dr * width - SIZE // 2).to(tl.int64) * channels
    return tl.load(images + first[:, None] + k[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _columns(k, channels, width, SIZE: tl.constexpr):
    """Return the channel of every value in a row of the window, its column, and that from the
    middle; columns of none are far.
    """
    column, channel = _divided(k, channels)
    return channel, column, tl.where(column < SIZE, column - SIZE // 2, width)


@triton.jit(do_not_specialize=_PLAIN)
def _windows(
    images, weight, found, pixels, height, width, channels, out, of_in, of_out,
    BACK: tl.constexpr, SIZE: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
    PIXELS: tl.constexpr,
):  # fmt: skip
    p, line, column = _places(tl.program_id(0) * PIXELS, pixels, height, width, PIXELS)
    n = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros([PIXELS, WIDTH], tl.float32)
    for start in range(0, SIZE * channels, DEPTH):
        k = start + tl.arange(0, DEPTH)
        c, place, dc = _columns(k, channels, width, SIZE)
        known = (place < SIZE)[:, None] & (n < out)[None, :]
        # Triton unrolls the loop; its class has no __iter__ in our stubs
        for row in tl.static_range(SIZE):  # pyright: ignore[reportGeneralTypeIssues]
            dr = row - SIZE // 2
            seen = _seen(images, p, line, column, k, dc, dr, height, width, channels, SIZE)
            tap = row * SIZE + place
            if BACK:
                tap = SIZE * SIZE - 1 - tap
            at = (c * of_in + tap)[:, None] + (n * of_out)[None, :]
            w = tl.load(weight + at, mask=known, other=0.0).to(tl.float32)
            total = tl.dot(seen, w, total)
    into = p.to(tl.int64)[:, None] * out + n[None, :]
    tl.store(found + into, total, mask=(p < pixels)[:, None] & (n < out)[None, :])


@triton.jit(do_not_specialize=_PLAIN)
def _weights(
    images, slope, sums, pixels, height, width, channels, out, share,
    SIZE: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) % SIZE
    k = tl.program_id(1) // SIZE * DEPTH + tl.arange(0, DEPTH)
    c, place, dc = _columns(k, channels, width, SIZE)
    n = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    begin = tl.program_id(0) * share
    total = tl.zeros([DEPTH, WIDTH], tl.float32)
    for start in range(begin, tl.minimum(begin + share, pixels), PIXELS):
        p, line, column = _places(start, pixels, height, width, PIXELS)
        dr = row - SIZE // 2
        seen = _seen(images, p, line, column, k, dc, dr, height, width, channels, SIZE)
        at = p.to(tl.int64)[:, None] * out + n[None, :]
        known = (p < pixels)[:, None] & (n < out)[None, :]
        arriving = tl.load(slope + at, mask=known, other=0.0).to(tl.float32)
        total = tl.dot(tl.trans(seen), arriving, total)
    # shares hold weights as they are kept: by output, input and place in the window
    into = (n * channels)[None, :] + c[:, None] + tl.program_id(0) * out * channels
    into = into * SIZE * SIZE + (row * SIZE + place)[:, None]
    tl.store(sums + into, total, mask=(place < SIZE)[:, None] & (n < out)[None, :])
