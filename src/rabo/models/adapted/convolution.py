"""Convolutions of tasks that have weights of their own.

A convolution is linear in images and in weights, and so are its two slopes: what it is (window),
the slopes of its images (back) and those of its weights (sums) are each other's slopes, to any
order.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false
# (a kernel gets its grid in brackets, and what is fixed for it as plain numbers)

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from rabo.models.adapted.by_task import ByTask
from rabo.models.narrow import _columns, _places, _seen

PIXELS, DEPTH, WIDTH = 128, 32, 64  # of a tile of images, and of one of weights, at most
SUMMED = 64  # pixels of which slopes of weights are added up at once
WARPS, STAGES = 4, 3
PROGRAMS = 512  # that keep a GPU busy with the slopes of weights

# numbers of which kernels are not made anew; multiples of 16 among the others let values be read
# several at a time
_PLAIN = ["pixels", "height", "width", "share", "tasks"]


def convolve(images: Tensor, weight: Tensor, half: bool = False) -> Tensor:
    """Return the convolution of one task with a square window of odd size; see `torch.vmap`.

    Products are of float32 (TF32 on a GPU), or for slopes of weights of bfloat16 (`half`), where
    input channels are a multiple of 32.
    """
    channels, size = weight.shape[1], weight.shape[2]
    if images.dtype != torch.float32 or weight.dtype != torch.float32:
        raise ValueError(
            f"images and weights must be in float32, got {images.dtype} and {weight.dtype}"
        )
    if images.shape[1] != channels or weight.shape[2:] != (size, size) or size % 2 == 0:
        raise ValueError(
            f"weights must have {images.shape[1]} input channels, as the images, and a square "
            f"window of odd size, got shape {tuple(weight.shape)}"
        )
    return _Window.apply(images.unsqueeze(0), weight.unsqueeze(0), False, half).squeeze(0)


class _Window(ByTask):
    """The convolution, or back: the slopes of its images, with the window turned around."""

    @staticmethod
    def forward(  # type: ignore[override]
        images: Tensor, weight: Tensor, back: bool, half: bool
    ) -> Tensor:
        return _window(images, weight, back)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *kept, ctx.back, ctx.half = inputs
        ctx.save_for_backward(*kept)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:  # type: ignore[override]
        (images, weight), back, half = ctx.saved_tensors, ctx.back, ctx.half
        of_images, of_weight, *_ = ctx.needs_input_grad
        ends = (images, slope) if back else (slope, images)  # at outputs, and at inputs
        return (
            _Window.apply(slope, weight, not back, half) if of_images else None,
            _Sums.apply(*ends, weight.shape[-1], half) if of_weight else None,
            None,
            None,
        )


class _Sums(ByTask):
    """The slopes of its weights: sums over pixels."""

    @staticmethod
    def forward(  # type: ignore[override]
        slope: Tensor, images: Tensor, size: int, half: bool
    ) -> Tensor:
        return _sums(slope, images, size, half)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *kept, _, ctx.half = inputs
        ctx.save_for_backward(*kept)

    @staticmethod
    def backward(ctx: Any, towards: Tensor) -> Any:  # type: ignore[override]
        (slope, images), half = ctx.saved_tensors, ctx.half
        of_slope, of_images, *_ = ctx.needs_input_grad
        return (
            _Window.apply(images, towards, False, half) if of_slope else None,
            _Window.apply(slope, towards, True, half) if of_images else None,
            None,
            None,
        )


@torch.library.custom_op(
    "rabo::window", mutates_args=(), schema="(Tensor images, Tensor weight, bool back) -> Tensor"
)
def _window(images: Tensor, weight: Tensor, back: bool) -> Tensor:
    images, (laid, of_task) = _last(images), _laid(weight, back)
    size, channels, out = weight.shape[-1], *weight.shape[2:0:-1]
    if back:
        channels, out = out, channels
    tasks, number, height, width = images.shape[:4]
    found = images.new_empty(tasks, number, height, width, out)
    pixels = number * height * width
    tile, across = _tiles(pixels, out)
    grid = (triton.cdiv(pixels, tile), triton.cdiv(out, across), tasks)
    _products[grid](
        images, laid, found, of_task, pixels, height, width, channels, out,
        back, size, channels % DEPTH == 0, DEPTH, across, tile,
        num_warps=WARPS, num_stages=STAGES if channels % DEPTH == 0 else 1,
    )  # fmt: skip
    return found.permute(0, 1, 4, 2, 3)


@torch.library.custom_op(
    "rabo::window_weight",
    mutates_args=(),
    schema="(Tensor slope, Tensor images, int size, bool half) -> Tensor",
)
def _sums(slope: Tensor, images: Tensor, size: int, half: bool) -> Tensor:
    slope, images = _last(slope), _last(images)
    (tasks, number, height, width, channels), out = images.shape, slope.shape[-1]
    pixels = number * height * width
    is_even = channels % DEPTH == 0
    depth = 2 * DEPTH if channels % (2 * DEPTH) == 0 else DEPTH
    deep = size**2 * channels // depth if is_even else size * triton.cdiv(size * channels, depth)
    _, across = _tiles(pixels, out)
    wide = triton.cdiv(out, across)
    share = triton.cdiv(pixels, max(1, PROGRAMS // (deep * wide * tasks)))
    share = max(1, triton.cdiv(share, SUMMED)) * SUMMED
    shares = triton.cdiv(pixels, share)
    sums = images.new_empty(shares, tasks, size, size, channels, out)
    if half and is_even:
        slope, images = slope.bfloat16(), images.bfloat16()
    _slopes[(shares, deep, tasks * wide)](
        images, slope, sums, pixels, height, width, channels, out, share, tasks,
        size, is_even, depth, across, SUMMED, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return (sums[0] if shares == 1 else sums.sum(dim=0)).permute(0, 4, 3, 1, 2)


@register_flop_formula([torch.ops.rabo.window])
def _window_flops(images: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    tasks, number, _channels, height, width = images
    _tasks, out, channels, size, _size = weight
    return 2 * tasks * number * height * width * out * channels * size**2


@register_flop_formula([torch.ops.rabo.window_weight])
def _sums_flops(slope: Sequence[int], images: Sequence[int], size: int, *_: Any, **__: Any) -> int:
    tasks, number, out, height, width = slope
    return 2 * tasks * number * height * width * out * images[2] * size**2


def _last(images: Tensor) -> Tensor:
    return images.permute(0, 1, 3, 4, 2).contiguous()


def _laid(weight: Tensor, back: bool) -> tuple[Tensor, int]:
    """Return weights by place in the window, outputs and inputs of it, and how far tasks are apart.

    What is added up lies side by side in memory, as units that multiply matrices want it.
    """
    if weight.stride(0) == 0:  # all tasks have the same
        weight = weight[:1]
    laid = weight.permute((0, 3, 4, 2, 1) if back else (0, 3, 4, 1, 2)).contiguous()
    return laid, 0 if len(laid) == 1 else laid[0].numel()


def _tiles(pixels: int, out: int) -> tuple[int, int]:
    """Return how many pixels and outputs a program sees."""
    half = PIXELS // 2
    return PIXELS if pixels > half else half, min(WIDTH, max(16, triton.next_power_of_2(out)))


@triton.jit
def _shifted(images, p, line, column, tap, c, height, width, channels, SIZE: tl.constexpr):
    """Return what some pixels see at one place of the window, in some channels that are there."""
    dr, dc = tap // SIZE - SIZE // 2, tap % SIZE - SIZE // 2
    inside = (line + dr >= 0) & (line + dr < height) & (column + dc >= 0) & (column + dc < width)
    at = (p + dr * width + dc).to(tl.int64) * channels
    return tl.load(images + at[:, None] + c[None, :], mask=inside[:, None], other=0.0)


@triton.jit(do_not_specialize=_PLAIN)
def _products(
    images, weight, found, of_task, pixels, height, width, channels, out,
    BACK: tl.constexpr, SIZE: tl.constexpr, EVEN: tl.constexpr, DEPTH: tl.constexpr,
    WIDTH: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Multiply what pixels see with weights; EVEN: channels are a multiple of a tile's depth."""
    task = tl.program_id(2).to(tl.int64)
    images += task * pixels * channels
    weight += task * of_task
    p, line, column = _places(tl.program_id(0) * PIXELS, pixels, height, width, PIXELS)
    n = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros([PIXELS, WIDTH], tl.float32)
    if EVEN:
        for start in range(0, SIZE * SIZE * channels, DEPTH):
            tap = start // channels
            c = start - tap * channels + tl.arange(0, DEPTH)
            seen = _shifted(images, p, line, column, tap, c, height, width, channels, SIZE)
            if BACK:  # the window turned around
                tap = SIZE * SIZE - 1 - tap
            at = (tap * out + n)[None, :] * channels + c[:, None]
            w = tl.load(weight + at, mask=(n < out)[None, :], other=0.0)
            total = tl.dot(seen, w, total)
    else:
        for start in range(0, SIZE * channels, DEPTH):
            k = start + tl.arange(0, DEPTH)
            c, place, dc = _columns(k, channels, width, SIZE)
            known = (place < SIZE)[:, None] & (n < out)[None, :]
            for row in tl.static_range(SIZE):  # pyright: ignore[reportGeneralTypeIssues]
                dr = row - SIZE // 2
                seen = _seen(images, p, line, column, k, dc, dr, height, width, channels, SIZE)
                tap = row * SIZE + place
                if BACK:
                    tap = SIZE * SIZE - 1 - tap
                at = (tap[:, None] * out + n[None, :]) * channels + c[:, None]
                w = tl.load(weight + at, mask=known, other=0.0)
                total = tl.dot(seen, w, total)
    into = found + (task * pixels + p)[:, None] * out + n[None, :]
    tl.store(into, total, mask=(p < pixels)[:, None] & (n < out)[None, :])


@triton.jit
def _product(a, b, total):
    """Multiply tiles of any precision; a name by which tests give an interpreter another."""
    return tl.dot(a, b, total)


@triton.jit(do_not_specialize=_PLAIN)
def _slopes(
    images, slope, sums, pixels, height, width, channels, out, share, tasks,
    SIZE: tl.constexpr, EVEN: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
    PIXELS: tl.constexpr,
):  # fmt: skip
    """Multiply what the pixels of a share see with their slopes, and add up."""
    task, block = tl.program_id(2) % tasks, tl.program_id(2) // tasks
    images += task.to(tl.int64) * pixels * channels
    slope += task.to(tl.int64) * pixels * out
    n = block * WIDTH + tl.arange(0, WIDTH)
    begin = tl.program_id(0) * share
    total = tl.zeros([DEPTH, WIDTH], tl.float32)
    if EVEN:
        first = tl.program_id(1) * DEPTH
        tap = first // channels
        c = first - tap * channels + tl.arange(0, DEPTH)
        place, row = tap % SIZE + tl.zeros_like(c), tap // SIZE
    else:
        row = tl.program_id(1) % SIZE
        k = tl.program_id(1) // SIZE * DEPTH + tl.arange(0, DEPTH)
        c, place, dc = _columns(k, channels, width, SIZE)
    for start in range(begin, tl.minimum(begin + share, pixels), PIXELS):
        p, line, column = _places(start, pixels, height, width, PIXELS)
        if EVEN:
            seen = _shifted(images, p, line, column, tap, c, height, width, channels, SIZE)
        else:
            dr = row - SIZE // 2
            seen = _seen(images, p, line, column, k, dc, dr, height, width, channels, SIZE)
        known = (p < pixels)[:, None] & (n < out)[None, :]
        at = p.to(tl.int64)[:, None] * out + n[None, :]
        arriving = tl.load(slope + at, mask=known, other=0.0)
        total = _product(tl.trans(seen), arriving, total)
    into = sums + (tl.program_id(0) * tasks + task).to(tl.int64) * SIZE * SIZE * channels * out
    at = ((row * SIZE + place) * channels + c)[:, None] * out + n[None, :]
    tl.store(into + at, total, mask=(place < SIZE)[:, None] & (n < out)[None, :])
