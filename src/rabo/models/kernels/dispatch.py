"""Choose between torch's kernels and our own for the layers of a backbone.

The choice depends on the device, on the tasks in a batch, on the derivatives that are taken, and on
RABO_KERNELS.
"""

import os
import warnings
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rabo.models.kernels.task_batching import layout


def has_kernels(images: Tensor) -> bool:
    """Return whether layers of tasks side by side have kernels in Triton.

    RABO_KERNELS=reference turns them off; RABO_KERNELS=float32 keeps them, with convolutions that
    multiply in float32 (TF32 on a GPU) at every width.
    """
    return (
        is_on_gpu(images)
        and images.dtype in (torch.float32, torch.bfloat16)
        and layout().tasks > 1
        and not is_transformed()
        and _kernels_run(images.device, wanted_kernels())
    )


def wanted_kernels() -> str:
    """Return what RABO_KERNELS asks for."""
    wanted = os.environ.get("RABO_KERNELS", "")
    if wanted not in ("", "reference", "float32"):
        raise ValueError(f"RABO_KERNELS must be reference or float32, or not set, got {wanted!r}")
    return wanted


def is_transformed() -> bool:
    """Say whether derivatives are taken that kernels do not have: by torch.func, or forwards."""
    # not in the stubs of torch
    transformed = torch._C._are_functorch_transforms_active()  # pyright: ignore[reportAttributeAccessIssue]
    return transformed or forward_ad._current_level >= 0


def has_tf32() -> bool:
    """Say whether convolutions may multiply float32 as TF32."""
    # not in the stubs of torch
    convolutions: Any = torch.backends.cudnn.conv  # pyright: ignore[reportAttributeAccessIssue]
    return convolutions.fp32_precision == "tf32"


def is_traced() -> bool:
    """Say whether a graph is made of what is done, which should not depend on sizes."""
    # not in `__all__` of torch.jit
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


@cache
def _kernels_run(device: torch.device, wanted: str) -> bool:
    """Try kernels: Triton compiles them when they are first used, and needs a C compiler."""
    if wanted == "reference" or find_spec("triton") is None:
        return False
    try:
        _try_kernels(device)
    except Exception as error:
        warnings.warn(
            f"kernels do not run here ({type(error).__name__}: {error}); the usual "
            "layers are used, which are slower. Install a C compiler (gcc), or set "
            "RABO_KERNELS=reference to go on without this warning",
            stacklevel=2,
        )
        return False
    return True


def _try_kernels(device: torch.device) -> None:
    from rabo.models.kernels.narrow_convolution import convolve
    from rabo.models.kernels.task_norm import normalise

    images, ones = torch.rand(4, 2, 2, 2, device=device), torch.ones(2, device=device)
    normalise(images, None, ones, ones, 2, 1.0, 1e-5)
    convolve(images, torch.ones(2, 2, 1, 1, device=device))


@cache
def has_bfloat16(device: torch.device) -> bool:
    """Say whether a device multiplies in bfloat16 by itself."""
    if device.type != "cuda":
        return True
    with torch.cuda.device(device):
        return torch.cuda.is_bf16_supported(including_emulation=False)


def is_on_gpu(images: Tensor) -> bool:
    """Say so of images; tests of what follows from it let it be true on a CPU."""
    return images.is_cuda
