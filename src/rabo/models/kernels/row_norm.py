"""Batch norm of few channels on a CPU, channels-last.

The usual kernel goes from pixel to pixel, and has a few channels for a vector of sixteen numbers.
Here pixels lie side by side until a row is long enough, and each channel has its place in it.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

LANES = 64  # numbers of a row, at most
ROWS = 1024  # whose products stay in a cache
SHORT = 32  # numbers of a row below which it does not pay
FEW = 12  # channels up to which it pays, but for one and eight: of these the usual kernel is fast
MANY = 10_000  # pixels below which so many small steps do not pay


def pays(input: Tensor) -> bool:
    """Say whether this is the faster way (measured: benchmarks/cpu/norms.json)."""
    return (
        input.device.type == "cpu"
        and input.dtype in (torch.float32, torch.float64)
        and 1 < input.shape[1] <= FEW
        and input.shape[1] != 8
        and input.numel() >= MANY * input.shape[1]
        and input.is_contiguous(memory_format=torch.channels_last)
        and _fold(input) * input.shape[1] >= SHORT
    )


def normalise(input: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return the norm with the statistics of the batch, as F.batch_norm does."""
    return cast(Any, _Norm.apply)(input, weight, bias, eps)


class _Norm(torch.autograd.Function):
    # torch's stubs declare any arguments, a function has its own
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        rows, fold = _rows(input)
        number = input.numel() // len(weight)
        mean = _by_channel(rows.sum(dim=0), fold) / number
        out = rows - mean.repeat(fold)  # so that no digits are lost to a large mean
        inverse = (_by_channel(_products(out, out), fold) / number + eps).rsqrt()
        out.mul_((weight * inverse).repeat(fold)).add_(bias.repeat(fold))
        ctx.save_for_backward(input, weight, bias, mean, inverse)
        ctx.eps = eps
        return out.reshape(_last(input).shape).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        input, weight, bias, mean, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative: by the usual kernel, which has one
            out = F.batch_norm(input, None, None, weight, bias, True, 0.0, ctx.eps)
            pairs = zip((input, weight, bias), ctx.needs_input_grad, strict=False)
            given = [t if is_asked else None for t, is_asked in pairs]
            asked = [t for t in given if t is not None]
            found = iter(torch.autograd.grad(out, asked, slope, create_graph=True))
            return *(None if t is None else next(found) for t in given), None
        (rows, fold), number = _rows(slope), input.numel() // len(weight)
        into = _rows(input)[0] - mean.repeat(fold)
        of_bias = _by_channel(rows.sum(dim=0), fold)
        of_weight = _by_channel(_products(rows, into), fold) * inverse
        scale = weight * inverse
        into.mul_((-scale * inverse * of_weight / number).repeat(fold))
        into.add_((-scale * of_bias / number).repeat(fold)).addcmul_(rows, scale.repeat(fold))
        return into.reshape(_last(input).shape).permute(0, 3, 1, 2), of_weight, of_bias, None


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum of products in every place of a row, with little memory for them."""
    parts = zip(a.split(ROWS), b.split(ROWS), strict=True)
    return torch.stack([(one * other).sum(dim=0) for one, other in parts]).sum(dim=0)


def _last(images: Tensor) -> Tensor:
    return images.permute(0, 2, 3, 1)


def _rows(images: Tensor) -> tuple[Tensor, int]:
    """Return images as rows, and of how many pixels each is."""
    fold = _fold(images)
    return _last(images).reshape(-1, fold * images.shape[1]), fold


def _fold(images: Tensor) -> int:
    """Return how many pixels lie in a row: as many as make no row longer than is wished."""
    channels = images.shape[1]
    pixels = images.numel() // channels
    return next(n for n in range(max(1, LANES // channels), 0, -1) if pixels % n == 0)


def _by_channel(row: Tensor, fold: int) -> Tensor:
    return row.reshape(fold, -1).sum(dim=0)
