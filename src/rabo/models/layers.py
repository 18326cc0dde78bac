"""Convolutions and norms that take the kernels that suit their input."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rabo.models.kernels import dispatch, row_norm
from rabo.models.kernels.task_batching import layout, side_by_side

WIDE = 16  # channels of the first layer from which convolutions are in bfloat16
NARROW = 512  # input times output channels up to which convolutions have kernels of their own


class TaskNorm(nn.BatchNorm2d):
    """Batch norm, task by task where several are side by side.

    With the images of all tasks in turn, tasks and channels lie beside each other in memory: the
    statistics of all tasks are one pass of the usual kernel, without moving anything.
    """

    def forward(self, input: Tensor) -> Tensor:
        tasks, first = layout()
        if self._keeps_statistics():
            return super().forward(input)
        if first and not dispatch.has_kernels(input):
            sets = input[: first * tasks], input[first * tasks :]
            with side_by_side(tasks):
                return torch.cat([self(images) for images in sets])
        if tasks == 1:
            return self._of_one_task(input)
        if dispatch.has_kernels(input):
            return self.activated(input, slope=1.0)
        shape = (input.shape[0] // tasks, tasks * input.shape[1], *input.shape[2:])
        weight, bias = self.weight.repeat(tasks), self.bias.repeat(tasks)
        seen = input.reshape(shape)
        return F.batch_norm(seen, None, None, weight, bias, True, 0.0, self.eps).reshape(
            input.shape
        )

    def _of_one_task(self, input: Tensor) -> Tensor:
        if _lies_channels_last(input):  # of which cuDNN's own norm is slower
            norm = torch.native_batch_norm
            return norm(input, self.weight, self.bias, None, None, True, 0.0, self.eps)[0]
        if not dispatch.is_transformed() and not dispatch.is_traced() and row_norm.pays(input):
            return row_norm.normalise(input, self.weight, self.bias, self.eps)
        return super().forward(input)

    def activated(self, input: Tensor, slope: float, beside: Tensor | None = None) -> Tensor:
        """Return leaky(norm(input) + beside)."""
        tasks, first = layout()
        if dispatch.has_kernels(input) and not self._keeps_statistics():
            from rabo.models.kernels.task_norm import normalise

            return normalise(input, beside, self.weight, self.bias, tasks, slope, self.eps, first)
        out = self(input)
        return F.leaky_relu(out if beside is None else out + beside, slope)

    def _keeps_statistics(self) -> bool:
        """Say whether it has statistics of its own, as in an exported model."""
        return self.running_mean is not None


def norm(channels: int) -> TaskNorm:
    """Normalise with the statistics of the batch: running ones do not average over widths."""
    return TaskNorm(channels, track_running_stats=False)


class Features(nn.Sequential):
    """Layers on images, in the order in memory that suits their kernels."""

    def forward(self, input: Tensor) -> Tensor:
        if dispatch.has_kernels(input):
            images = channels_last(input)
            return super().forward(images.to(self._precision(images))).to(input.dtype)
        if dispatch.is_on_gpu(input) or layout().tasks > 1 or dispatch.is_transformed():
            return super().forward(input)
        return super().forward(channels_last(input))

    def _precision(self, images: Tensor) -> torch.dtype:
        """Return in what images and weights are kept; sums and statistics are in float32."""
        is_wide = len(next(self.parameters())) >= WIDE
        if (
            is_wide
            and dispatch.wanted_kernels() != "float32"
            and dispatch.has_bfloat16(images.device)
        ):
            return torch.bfloat16
        return images.dtype


class Convolution(nn.Conv2d):
    """A convolution without bias, in the precision and the order of its input."""

    def __init__(self, in_channels: int, out_channels: int, size: int, stride: int = 1):
        super().__init__(in_channels, out_channels, size, stride, size // 2, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        weight, laid = self.weight, cast(Any, _Laid.apply)
        if dispatch.has_kernels(input):
            if self._is_narrow(input):
                from rabo.models.kernels.narrow_convolution import convolve

                return convolve(input, weight)
            weight = laid(weight, input.dtype)
        elif _lies_channels_last(input):
            weight = weight.contiguous(memory_format=torch.channels_last)
        return self._conv_forward(input, weight, None)

    def _is_narrow(self, input: Tensor) -> bool:
        """Say whether kernels for few channels are faster (measured: benchmarks/README.md).

        They multiply float32 as TF32, where that is allowed.
        """
        out, channels, size = self.weight.shape[:3]  # those of a submodel
        if input.dtype == torch.float32:
            few = channels * out <= NARROW and dispatch.has_tf32()
        else:
            few = channels == 1
        return few and self.stride == (1, 1) and size % 2 == 1


class _Laid(torch.autograd.Function):
    """A weight as its convolution wants it, once for both directions; its slope as it is kept."""

    # torch's stubs declare any arguments, a function has its own
    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        ctx.dtype = weight.dtype
        return weight.to(dtype, memory_format=torch.channels_last)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return slope.to(ctx.dtype, memory_format=torch.contiguous_format), None


def _lies_channels_last(images: Tensor) -> bool:
    """Say so of images on a GPU, where a transform does not forbid to ask."""
    if not dispatch.is_on_gpu(images) or dispatch.is_transformed():
        return False
    return images.is_contiguous(memory_format=torch.channels_last)


def channels_last(images: Tensor) -> Tensor:
    """Lay images out so that layers see them as channels-last, those of one channel too."""
    if images.shape[1] > 1:
        return images.contiguous(memory_format=torch.channels_last)
    size, width = images.shape[2] * images.shape[3], images.shape[3]
    return images.contiguous().as_strided(images.shape, (size, 1, width, 1))


class Average(nn.AdaptiveAvgPool2d):
    """The mean over space."""

    def forward(self, input: Tensor) -> Tensor:
        return average(input)


def average(input: Tensor) -> Tensor:
    """Take the mean over space; under vmap torch's own has no rule for channels-last."""
    if dispatch.is_transformed():
        return input.mean(dim=(-2, -1), keepdim=True)
    return F.adaptive_avg_pool2d(input, 1)
