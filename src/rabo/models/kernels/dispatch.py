"""Which kernels the layers of a backbone use: those of the framework, or our own.

It depends on where images are, on how a batch holds tasks, on which derivatives are taken, and on
RABO_KERNELS.
"""

import os
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rabo.models.layout import layout


def has_kernels(images: Tensor) -> bool:
    """Say whether norms of tasks side by side have kernels of their own: `rabo.models.kernels`.

    RABO_KERNELS=reference turns them off; RABO_KERNELS=float32 keeps them, with convolutions that
    multiply in float32 (TF32 on a GPU) at every width.
    """
    return (
        is_on_gpu(images)
        and images.dtype in (torch.float32, torch.bfloat16)
        and layout().tasks > 1
        and not is_transformed()
        and _kernels_run(images.device, wanted_kernels(), _try_usual)
    )


def wanted_kernels() -> str:
    """Return what RABO_KERNELS asks for."""
    wanted = os.environ.get("RABO_KERNELS", "")
    if wanted not in ("", "reference", "float32"):
        raise ValueError(f"RABO_KERNELS must be reference or float32, or not set, got {wanted!r}")
    return wanted


def is_transformed() -> bool:
    """Say whether derivatives are taken that kernels do not have: by torch.func, or forwards."""
    transformed = torch._C._are_functorch_transforms_active()  # pyright: ignore[reportAttributeAccessIssue]
    return transformed or forward_ad._current_level >= 0


def adapts(images: Tensor) -> bool:
    """Say whether layers of tasks with weights of their own have kernels: `rabo.models.adapted`.

    That is under vmap, with derivatives backwards alone. They multiply float32 as TF32.
    """
    return (
        is_on_gpu(images)
        and images.dtype == torch.float32
        and "vmap" in (transforms := _transforms())
        and transforms <= {"vmap", "grad"}
        and forward_ad._current_level < 0
        and has_tf32()
        and _kernels_run(images.device, wanted_kernels(), _try_adapted)
    )


def has_tf32() -> bool:
    """Say whether convolutions may multiply float32 as TF32."""
    convolutions: Any = torch.backends.cudnn.conv  # pyright: ignore[reportAttributeAccessIssue]
    return convolutions.fp32_precision == "tf32"


def _transforms() -> set[str]:
    """Return which transforms of torch.func are under way: vmap, grad, jvp."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    levels = functorch.get_interpreter_stack() or ()
    return {level.key().name.lower() for level in levels}


def is_traced() -> bool:
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

    run_all(device, half=has_bfloat16(device))


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
