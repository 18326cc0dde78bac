"""Conv4, ResNet-12 and ResNet-18 with batch-statistics norm."""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from rabo.models import rows

WIDE = 16  # channels of the first layer from which convolutions are in bfloat16
NARROW = 512  # input times output channels up to which convolutions have kernels of their own


class _Layout(NamedTuple):
    """What a batch holds: the images of how many tasks, and how many of each are a set apart."""

    tasks: int = 1
    first: int = 0


_ONE_TASK = _Layout()
_layout: ContextVar[_Layout] = ContextVar("layout", default=_ONE_TASK)


@contextmanager
def side_by_side(num_tasks: int, first: int = 0) -> Iterator[None]:
    """Let a batch hold the images of several tasks in turn, each with statistics of its own.

    The first images of each task may have others than the rest: a support set before its queries.
    """
    token = _layout.set(_Layout(num_tasks, first))
    try:
        yield
    finally:
        _layout.reset(token)


def has_kernels(images: Tensor) -> bool:
    """Say whether norms of tasks side by side have kernels of their own: `rabo.models.kernels`.

    RABO_KERNELS=reference turns them off; RABO_KERNELS=float32 keeps them, with convolutions that
    multiply in float32 (TF32 on a GPU) at every width.
    """
    on_gpu = images.is_cuda and images.dtype in (torch.float32, torch.bfloat16)
    return (
        on_gpu
        and _layout.get().tasks > 1
        and not _is_transformed()
        and _kernels_run(images.device, _wanted_kernels(), _try_usual)
    )


def _wanted_kernels() -> str:
    wanted = os.environ.get("RABO_KERNELS", "")
    if wanted not in ("", "reference", "float32"):
        raise ValueError(f"RABO_KERNELS must be reference or float32, or not set, got {wanted!r}")
    return wanted


def _is_transformed() -> bool:
    """Say whether derivatives are taken that kernels do not have: by torch.func, or forwards."""
    transformed = torch._C._are_functorch_transforms_active()  # pyright: ignore[reportAttributeAccessIssue]
    return transformed or forward_ad._current_level >= 0


def adapts(images: Tensor) -> bool:
    """Say whether layers of tasks with weights of their own have kernels: `rabo.models.adapted`.

    That is under vmap, with derivatives backwards alone. They multiply float32 as TF32.
    """
    return (
        _is_on_gpu(images)
        and images.dtype == torch.float32
        and "vmap" in (transforms := _transforms())
        and transforms <= {"vmap", "grad"}
        and forward_ad._current_level < 0
        and _has_tf32()
        and _kernels_run(images.device, _wanted_kernels(), _try_adapted)
    )


def _has_tf32() -> bool:
    """Say whether convolutions may multiply float32 as TF32."""
    convolutions: Any = torch.backends.cudnn.conv  # pyright: ignore[reportAttributeAccessIssue]
    return convolutions.fp32_precision == "tf32"


def _transforms() -> set[str]:
    """Return which transforms of torch.func are under way: vmap, grad, jvp."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    levels = functorch.get_interpreter_stack() or ()
    return {level.key().name.lower() for level in levels}


def _is_traced() -> bool:
    """Say whether a graph is made of what is done, which should not depend on sizes."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


@cache
def _kernels_run(
    device: torch.device, wanted: str, attempt: Callable[[torch.device], None]
) -> bool:
    """Try kernels: Triton compiles them when they are first used, and needs a C compiler."""
    if wanted == "reference" or find_spec("triton") is None:
        return False
    try:
        with torch._C._DisableFuncTorch():
            attempt(device)
    except Exception as error:
        warnings.warn(
            f"kernels do not run here ({type(error).__name__}: {error}); the usual "
            "layers are used, which are slower. Install a C compiler (gcc), or set "
            "RABO_KERNELS=reference to go on without this warning",
            stacklevel=2,
        )
        return False
    return True


def _try_usual(device: torch.device) -> None:
    from rabo.models.kernels import normalise
    from rabo.models.narrow import convolve

    images, ones = torch.rand(4, 2, 2, 2, device=device), torch.ones(2, device=device)
    normalise(images, None, ones, ones, 2, 1.0, 1e-5)
    convolve(images, torch.ones(2, 2, 1, 1, device=device))


def _try_adapted(device: torch.device) -> None:
    from rabo.models.adapted.trial import run_all

    run_all(device, half=_has_bfloat16(device))


@cache
def _has_bfloat16(device: torch.device) -> bool:
    """Say whether a device multiplies in bfloat16 by itself."""
    if device.type != "cuda":
        return True
    with torch.cuda.device(device):
        return torch.cuda.is_bf16_supported(including_emulation=False)


class TaskNorm(nn.BatchNorm2d):
    """Batch norm, task by task where several are side by side.

    With the images of all tasks in turn, tasks and channels lie beside each other in memory: the
    statistics of all tasks are one pass of the usual kernel, without moving anything.
    """

    def forward(self, input: Tensor) -> Tensor:
        tasks, first = _layout.get()
        if self._keeps_statistics():
            return super().forward(input)
        if tasks == 1 and not first and adapts(input):
            return self.activated(input, slope=1.0)
        if first and not has_kernels(input):
            sets = input[: first * tasks], input[first * tasks :]
            with side_by_side(tasks):
                return torch.cat([self(images) for images in sets])
        if tasks == 1 and _lies_channels_last(input):  # of which cuDNN's own norm is slower
            norm = torch.native_batch_norm
            return norm(input, self.weight, self.bias, None, None, True, 0.0, self.eps)[0]
        if tasks == 1 and not _is_transformed() and not _is_traced() and rows.pays(input):
            return rows.normalise(input, self.weight, self.bias, self.eps)
        if tasks == 1:
            return super().forward(input)
        if has_kernels(input):
            return self.activated(input, slope=1.0)
        shape = (input.shape[0] // tasks, tasks * input.shape[1], *input.shape[2:])
        weight, bias = self.weight.repeat(tasks), self.bias.repeat(tasks)
        seen = input.reshape(shape)
        return F.batch_norm(seen, None, None, weight, bias, True, 0.0, self.eps).reshape(
            input.shape
        )

    def activated(self, input: Tensor, slope: float, beside: Tensor | None = None) -> Tensor:
        """Return leaky(norm(input) + beside)."""
        tasks, first = _layout.get()
        if has_kernels(input) and not self._keeps_statistics():
            from rabo.models.kernels import normalise

            return normalise(input, beside, self.weight, self.bias, tasks, slope, self.eps, first)
        if tasks == 1 and not first and adapts(input) and not self._keeps_statistics():
            from rabo.models import adapted

            return adapted.normalise(input, beside, self.weight, self.bias, slope, self.eps)
        out = self(input)
        return F.leaky_relu(out if beside is None else out + beside, slope)

    def _keeps_statistics(self) -> bool:
        """Say whether it has statistics of its own, as in an exported model."""
        return self.running_mean is not None


def norm(channels: int) -> TaskNorm:
    """Normalise with the statistics of the batch: running ones do not average over widths."""
    return TaskNorm(channels, track_running_stats=False)


class _Features(nn.Sequential):
    """Layers on images, in the order in memory that suits their kernels."""

    def forward(self, input: Tensor) -> Tensor:
        if has_kernels(input):
            images = _channels_last(input)
            return super().forward(images.to(self._precision(images))).to(input.dtype)
        if input.is_cuda or _layout.get().tasks > 1 or _is_transformed():
            return super().forward(input)
        return super().forward(_channels_last(input))

    def _precision(self, images: Tensor) -> torch.dtype:
        """Return in what images and weights are kept; sums and statistics are in float32."""
        is_wide = len(next(self.parameters())) >= WIDE
        if is_wide and _wanted_kernels() != "float32" and _has_bfloat16(images.device):
            return torch.bfloat16
        return images.dtype


class Convolution(nn.Conv2d):
    """A convolution without bias, in the precision and the order of its input."""

    def __init__(self, in_channels: int, out_channels: int, size: int, stride: int = 1):
        super().__init__(in_channels, out_channels, size, stride, size // 2, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        weight, laid = self.weight, cast(Any, _Laid.apply)
        if has_kernels(input):
            if self._is_narrow(input):
                from rabo.models.narrow import convolve

                return convolve(input, weight)
            weight = laid(weight, input.dtype)
        elif adapts(input) and self.stride == (1, 1) and weight.shape[2] % 2 == 1:
            from rabo.models import adapted

            half = _wanted_kernels() != "float32" and _has_bfloat16(input.device)
            return adapted.convolve(input, weight, half)
        elif _lies_channels_last(input):
            weight = weight.contiguous(memory_format=torch.channels_last)
        return self._conv_forward(input, weight, None)

    def _is_narrow(self, input: Tensor) -> bool:
        """Say whether kernels for few channels are faster (measured: docs/performance.md).

        They multiply float32 as TF32, where that is allowed.
        """
        out, channels, size = self.weight.shape[:3]  # those of a submodel
        if input.dtype == torch.float32:
            few = channels * out <= NARROW and _has_tf32()
        else:
            few = channels == 1
        return few and self.stride == (1, 1) and size % 2 == 1


class _Laid(torch.autograd.Function):
    """A weight as its convolution wants it, once for both directions; its slope as it is kept."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        ctx.dtype = weight.dtype
        return weight.to(dtype, memory_format=torch.channels_last)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return slope.to(ctx.dtype, memory_format=torch.contiguous_format), None


def _lies_channels_last(images: Tensor) -> bool:
    """Say so of images on a GPU, where a transform does not forbid to ask."""
    if not _is_on_gpu(images) or _is_transformed():
        return False
    return images.is_contiguous(memory_format=torch.channels_last)


def _is_on_gpu(images: Tensor) -> bool:
    return images.is_cuda


def _channels_last(images: Tensor) -> Tensor:
    """Lay images out so that layers see them as channels-last, those of one channel too."""
    if images.shape[1] > 1:
        return images.contiguous(memory_format=torch.channels_last)
    size, width = images.shape[2] * images.shape[3], images.shape[3]
    return images.contiguous().as_strided(images.shape, (size, 1, width, 1))


class Conv4(_Features):
    """Four blocks of convolution, norm, ReLU and pooling; features are flattened."""

    def __init__(self, channels: int = 64, in_channels: int = 1):
        blocks: list[nn.Module] = []
        for i in range(4):
            width = in_channels if i == 0 else channels
            blocks += [
                Convolution(width, channels, 3),
                norm(channels),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ]
        super().__init__(*blocks, nn.Flatten())


class _Block12(nn.Module):
    """Three convolutions beside a projection, then pooling."""

    def __init__(self, in_channels: int, channels: int, pool: bool):
        super().__init__()
        widths = (in_channels, channels, channels)
        self.convs = nn.ModuleList(Convolution(w, channels, 3) for w in widths)
        self.norms = nn.ModuleList(norm(channels) for _ in widths)
        self.shortcut = Convolution(in_channels, channels, 1)
        self.shortcut_norm = norm(channels)
        self.pool = nn.MaxPool2d(2) if pool else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        norms: Any = self.norms
        beside = self.shortcut_norm(self.shortcut(inputs))
        out = norms[0].activated(self.convs[0](inputs), 0.1)
        out = norms[1].activated(self.convs[1](out), 0.1)
        return self.pool(norms[2].activated(self.convs[2](out), 0.1, beside))


class _Average(nn.AdaptiveAvgPool2d):
    """The mean over space."""

    def forward(self, input: Tensor) -> Tensor:
        return _average(input)


def _average(input: Tensor) -> Tensor:
    """Take the mean over space; under vmap torch's own has no rule for channels-last."""
    if _is_transformed():
        return input.mean(dim=(-2, -1), keepdim=True)
    return F.adaptive_avg_pool2d(input, 1)


class ResNet12(_Features):
    """The few-shot backbone; features are averaged over space.

    64-160-320-640 channels by default; with 28x28 images the last block is 3x3 and not pooled.
    """

    def __init__(self, widths: Sequence[int] = (64, 160, 320, 640), in_channels: int = 1):
        blocks: list[nn.Module] = []
        for i, width in enumerate(widths):
            blocks.append(_Block12(in_channels, width, pool=i < len(widths) - 1))
            in_channels = width
        super().__init__(*blocks, _Average(1), nn.Flatten())


class _Block18(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, in_channels: int, channels: int, stride: int):
        super().__init__()
        self.conv1 = Convolution(in_channels, channels, 3, stride)
        self.norm1 = norm(channels)
        self.conv2 = Convolution(channels, channels, 3)
        self.norm2 = norm(channels)
        self.shortcut = (
            nn.Sequential(Convolution(in_channels, channels, 1, stride), norm(channels))
            if stride != 1 or in_channels != channels
            else nn.Identity()
        )

    def forward(self, inputs: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(inputs)))
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(inputs))


class ResNet18(nn.Module):
    """ResNet-18 with the 3x3 stem for 32x32 images, which lie channels-last."""

    def __init__(self, num_classes: int = 10, width: int = 64, in_channels: int = 3):
        super().__init__()
        self.stem = Convolution(in_channels, width, 3)
        self.stem_norm = norm(width)
        stages, channels = [], width
        for i in range(4):
            out, stride = width * 2**i, 1 if i == 0 else 2
            stages += [_Block18(channels, out, stride), _Block18(out, out, 1)]
            channels = out
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        if not _is_transformed():
            images = _channels_last(images)
        out = self.stages(F.relu(self.stem_norm(self.stem(images))))
        return self.classifier(torch.flatten(_average(out), 1))
