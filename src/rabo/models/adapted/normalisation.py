"""Norms of tasks that have weights of their own; first and second slopes in closed form."""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# (a kernel gets its grid in brackets, and what is fixed for it as plain numbers)

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from rabo.models import kernels
from rabo.models.adapted.by_task import ByTask
from rabo.models.kernels import CHANNELS, WARPS, _affine, _arriving, _load, _row, _tile


def normalise(
    images: Tensor, beside: Tensor | None, weight: Tensor, bias: Tensor, slope: float, eps: float
) -> Tensor:
    """Return leaky(norm(images) + beside) of one task; see `torch.vmap`."""
    if images.shape[0] * images.shape[2:].numel() <= 1:
        raise ValueError(
            f"images must have more than one value per channel, got shape {tuple(images.shape)}"
        )
    if beside is not None and beside.shape != images.shape:
        raise ValueError(
            f"beside must have the shape of the images, {tuple(images.shape)}, got "
            f"{tuple(beside.shape)}"
        )
    given = [None if t is None else t.unsqueeze(0) for t in (images, beside, weight, bias)]
    return _Norm.apply(*given, slope, eps)[0].squeeze(0)


class _Norm(ByTask):
    """leaky(norm(images) + beside), then means and inverse deviations by task and channel."""

    @staticmethod
    def forward(  # type: ignore[override]
        images: Tensor, beside: Any, weight: Tensor, bias: Tensor, slope: float, eps: float
    ) -> tuple[Tensor, ...]:
        near = None if beside is None else beside.flatten(0, 1)
        found = kernels._normalise(
            images.flatten(0, 1), near, weight, bias, len(images), slope, eps, 0, True
        )
        return found[0].unflatten(0, images.shape[:2]), *found[1:]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        images, beside, weight, bias, ctx.slope, _ = inputs
        out, mean, scale = output
        kept = None if beside is None else out  # its sign; else it is computed again
        ctx.save_for_backward(images, kept, weight, bias, mean, scale)
        ctx.mark_non_differentiable(mean, scale)

    @staticmethod
    def backward(ctx: Any, slope_out: Tensor, *_: Any) -> Any:  # type: ignore[override]
        images, out, weight, bias, mean, scale = ctx.saved_tensors
        found = _NormBack.apply(slope_out, images, out, weight, bias, mean, scale, ctx.slope)
        of_images, of_beside, of_weight, of_bias = found
        return of_images, None if out is None else of_beside, of_weight, of_bias, None, None


class _NormBack(ByTask):
    """Its slopes in images, in what is beside, in weights and in biases.

    They depend on slopes, images and weights; signs, means and deviations are at hand already.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        slope_out: Tensor, images: Tensor, out: Any, weight: Tensor, bias: Tensor, mean: Tensor,
        scale: Tensor, slope: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        flat = [None if t is None else t.flatten(0, 1) for t in (slope_out, images, out)]
        given = (*flat, weight, bias, mean, scale, slope, len(images), 0, True)
        into, of_beside, sums = kernels._backward(*cast(Any, given))
        of_bias, of_weight = sums.unbind(dim=1)
        if out is None:
            of_beside = into.new_empty(len(images), 0)  # a row of nothing for every task
        else:
            of_beside = of_beside.unflatten(0, images.shape[:2])
        return into.unflatten(0, images.shape[:2]), of_beside, of_weight, of_bias

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *given, ctx.slope = inputs
        ctx.save_for_backward(*given)

    @staticmethod
    def backward(ctx: Any, *towards: Tensor) -> Any:  # type: ignore[override]
        found = _NormTwice.apply(*towards, *ctx.saved_tensors, ctx.slope)
        of_slope, of_images, of_weight = found
        return of_slope, of_images, None, of_weight, *[None] * 4


class _NormTwice(ByTask):
    """The slopes of those in slopes, images and weights."""

    @staticmethod
    def forward(  # type: ignore[override]
        of_images: Tensor, of_beside: Tensor, of_weight: Tensor, of_bias: Tensor,
        slope_out: Tensor, images: Tensor, out: Any, weight: Tensor, bias: Tensor, mean: Tensor,
        scale: Tensor, slope: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        near = None if out is None else of_beside.flatten(0, 1)
        flat = [None if t is None else t.flatten(0, 1) for t in (of_images, slope_out, images, out)]
        given = (near, of_weight, of_bias, *flat, weight, bias, mean, scale, slope, len(images))
        *large, by_weight = _normalise_twice(*cast(Any, given))
        return *(t.unflatten(0, images.shape[:2]) for t in large), by_weight

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:  # type: ignore[override]
        raise NotImplementedError(
            "norms of tasks have no third derivatives on a GPU; set RABO_KERNELS=reference"
        )


@torch.library.custom_op(
    "rabo::normalise_twice",
    mutates_args=(),
    schema="(Tensor? of_beside, Tensor of_weight, Tensor of_bias, Tensor of_images, "
    "Tensor slope_out, Tensor images, Tensor? out, Tensor weight, Tensor bias, Tensor mean, "
    "Tensor scale, float slope, int tasks) -> (Tensor, Tensor, Tensor)",
)
def _normalise_twice(
    of_beside: Tensor | None, of_weight: Tensor, of_bias: Tensor, of_images: Tensor,
    slope_out: Tensor, images: Tensor, out: Tensor | None, weight: Tensor, bias: Tensor,
    mean: Tensor, scale: Tensor, slope: float, tasks: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return slopes in slopes, in images and in weights."""
    laid = {"memory_format": torch.channels_last}
    large = [
        None if t is None else t.contiguous(**laid)
        for t in (of_images, of_beside, slope_out, images, out)
    ]
    small = [t.contiguous() for t in (weight, bias, of_weight, of_bias, mean, scale)]
    grid, numbers, _ = kernels._plan(images, tasks, 0)
    sets, _, pixels, _, channels, _, share, shares = numbers
    sums = images.new_empty(5 * shares * sets * channels)
    by_slope, by_images = (torch.empty_like(cast(Tensor, large[3])) for _ in range(2))
    by_weight = torch.empty_like(small[0])
    plain = pixels, channels, share, shares
    _add_up_twice[grid](
        *large, *small, sums, slope, *plain, out is not None, CHANNELS, kernels.PIXELS,
        num_warps=WARPS,
    )  # fmt: skip
    _apply_twice[grid](
        *large, *small, sums, by_slope, by_images, by_weight, slope, *plain,
        out is not None, CHANNELS, kernels.PIXELS, kernels.SHARES, num_warps=WARPS,
    )  # fmt: skip
    return by_slope, by_images, by_weight


@triton.jit
def _at(out, slope_out, images, start, end, t, c, w, b, centre, inverse, pixels, channels, slope,
        BESIDE: tl.constexpr, PIXELS: tl.constexpr):  # fmt: skip
    """Return which pixels there are and where, their normalised values, and slopes behind ReLU."""
    inside, at = _tile(start, end, t, c, pixels, 1, channels, 1, True, PIXELS)
    unit = (_load(images, at, inside) - centre) * inverse
    return inside, at, unit, _arriving(slope_out, out, at, inside, unit, w, b, slope, BESIDE)


@triton.jit(do_not_specialize=["pixels", "share", "shares"])
def _add_up_twice(
    of_images, of_beside, slope_out, images, out, weight, bias, of_weight, of_bias, mean, scale,
    sums, slope, pixels, channels, share, shares,
    BESIDE: tl.constexpr, CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Add up s, t, s·unit, t·unit and s·t: s is the slope of the norm, t that of its slope."""
    task, c = tl.program_id(0), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    begin = tl.program_id(2) * share
    end = tl.minimum(begin + share, pixels)
    own = task * channels
    centre, inverse = _row(mean, own, c, channels), _row(scale, own, c, channels)
    w, b = _affine(weight, bias, task, c, channels, True)
    sum_s = tl.zeros([PIXELS, CHANNELS], tl.float32)
    sum_t = tl.zeros([PIXELS, CHANNELS], tl.float32)
    along_s = tl.zeros([PIXELS, CHANNELS], tl.float32)
    along_t = tl.zeros([PIXELS, CHANNELS], tl.float32)
    both = tl.zeros([PIXELS, CHANNELS], tl.float32)
    for start in range(begin, end, PIXELS):
        inside, at, unit, s = _at(
            out, slope_out, images, start, end, task, c, w, b, centre, inverse, pixels, channels,
            slope, BESIDE, PIXELS,
        )  # fmt: skip
        t = _load(of_images, at, inside)
        sum_s += s
        sum_t += t
        along_s += s * unit
        along_t += t * unit
        both += s * t
    into = sums + (tl.program_id(2) * tl.num_programs(0) + task) * 5 * channels + c
    tl.store(into, tl.sum(sum_s, 0), mask=c < channels)
    tl.store(into + channels, tl.sum(sum_t, 0), mask=c < channels)
    tl.store(into + 2 * channels, tl.sum(along_s, 0), mask=c < channels)
    tl.store(into + 3 * channels, tl.sum(along_t, 0), mask=c < channels)
    tl.store(into + 4 * channels, tl.sum(both, 0), mask=c < channels)


@triton.jit
def _mean(sums, which, task, c, channels, pixels, shares, SHARES: tl.constexpr):
    """Add up what all shares have saved, over the number of pixels, as a row."""
    s = tl.arange(0, SHARES)
    known = (s < shares)[:, None] & (c < channels)[None, :]
    row = (s[:, None] * tl.num_programs(0) + task) * 5 + which
    total = tl.sum(tl.load(sums + row * channels + c[None, :], mask=known, other=0.0), 0)
    return (total / pixels)[None, :]


@triton.jit(do_not_specialize=["pixels", "share", "shares"])
def _apply_twice(
    of_images, of_beside, slope_out, images, out, weight, bias, of_weight, of_bias, mean, scale,
    sums, by_slope, by_images, by_weight, slope, pixels, channels, share, shares,
    BESIDE: tl.constexpr, CHANNELS: tl.constexpr, PIXELS: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """With P v = v - mean(v) - unit mean(v unit), the slope of a norm is w/σ P s. It is <t, .> of
    that, p·sum(s) and q·sum(s unit) whose slopes in s, images and w are written here.
    """
    task, c = tl.program_id(0), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    begin = tl.program_id(2) * share
    end = tl.minimum(begin + share, pixels)
    own = task * channels
    centre, inverse = _row(mean, own, c, channels), _row(scale, own, c, channels)
    w, b = _affine(weight, bias, task, c, channels, True)
    q, p = _affine(of_weight, of_bias, task, c, channels, True)
    mean_s = _mean(sums, 0, task, c, channels, pixels, shares, SHARES)
    mean_t = _mean(sums, 1, task, c, channels, pixels, shares, SHARES)
    along_s = _mean(sums, 2, task, c, channels, pixels, shares, SHARES)
    along_t = _mean(sums, 3, task, c, channels, pixels, shares, SHARES)
    both = _mean(sums, 4, task, c, channels, pixels, shares, SHARES)
    both -= mean_s * mean_t + along_s * along_t  # mean of t·P s
    if tl.program_id(2) == 0:
        into = by_weight + own + c[None, :]
        tl.store(into, inverse * both * pixels, mask=(c < channels)[None, :])
    size = w * inverse
    mean_g = q * mean_s - size * (mean_t * along_s + mean_s * along_t)
    along_g = q * along_s - 2 * size * along_s * along_t
    for start in range(begin, end, PIXELS):
        inside, at, unit, s = _at(
            out, slope_out, images, start, end, task, c, w, b, centre, inverse, pixels, channels,
            slope, BESIDE, PIXELS,
        )  # fmt: skip
        t = _load(of_images, at, inside)
        into_s = size * (t - mean_t - unit * along_t) + p + q * unit
        signed = unit * w + b
        if BESIDE:
            into_s += _load(of_beside, at, inside)
            signed = _load(out, at, inside)
        tl.store(by_slope + at, tl.where(signed > 0, into_s, into_s * slope), mask=inside)
        g = q * s - size * (t * along_s + s * along_t)
        g -= mean_g + unit * along_g
        tl.store(by_images + at, inverse * (g - size * both * unit), mask=inside)
