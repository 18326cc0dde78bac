"""What a piece of work costs, counted by running it."""

import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")


class Cost(NamedTuple):
    """What one client spent on one piece of work."""

    multiply_adds: int = 0
    peak_memory_bytes: int = 0
    seconds: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0

    def plus(self, other: "Cost") -> "Cost":
        """Add what adds up; memory is the larger of the two."""
        return Cost(
            self.multiply_adds + other.multiply_adds,
            max(self.peak_memory_bytes, other.peak_memory_bytes),
            self.seconds + other.seconds,
            self.bytes_down + other.bytes_down,
            self.bytes_up + other.bytes_up,
        )


class Counter(TorchDispatchMode):
    """Counts multiply-adds with torch's own formulas, and follows the bytes of live tensors.

    torch's FlopCounterMode hooks modules, which fails for gradients with respect to leaves; its
    registry of formulas does not. The registry is imported here because it imports triton, which
    takes 74 MB.
    """

    def __init__(self, held: int = 0):
        from torch.utils.flop_counter import flop_registry

        super().__init__()
        self._registry = flop_registry
        self.flops = 0
        self.now = self.peak = held
        self._alive: dict[int, _Followed] = {}
        self._gone: deque[Any] = deque()  # not a method of ours: a Ctrl-C in it would be lost

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        formula = _FORMULAS.get(packet) or self._registry.get(packet)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, Tensor):
                self._follow(item)
        return result

    def _follow(self, tensor: Tensor) -> None:
        while self._gone:
            self._release(self._gone.popleft())
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._alive:
            return
        followed = self._alive[key] = _Followed(storage, self._gone.append)
        followed.key, followed.size = key, storage.nbytes()
        self.now += followed.size
        self.peak = max(self.peak, self.now)

    def _release(self, followed: "_Followed") -> None:
        del self._alive[followed.key]
        self.now -= followed.size


class _Followed(weakref.ref):  # type: ignore[type-arg]
    """A storage that may go, and what it held."""

    key: int
    size: int


def _of_convolution(
    slope: Tensor, input: Tensor, weight: Tensor, _bias: Any, _stride: Any, _padding: Any,
    _dilation: Any, transposed: bool, _output_padding: Any, _groups: int, wanted: Any, **_: Any,
) -> int:  # fmt: skip
    """Count the slopes of a convolution; torch's formula takes one of g groups for g of them."""
    each = (input if transposed else slope).numel() * weight[0].numel()
    return 2 * each * (wanted[0] + wanted[1])


# torch counts matrix products and convolutions; problems made of matrices also need these
_FORMULAS = {
    torch.ops.aten.convolution_backward: _of_convolution,
    torch.ops.aten.mv: lambda a, b, *_, **__: 2 * a.numel(),
    torch.ops.aten.dot: lambda a, b, *_, **__: 2 * a.numel(),
}


def measure(work: Callable[[], T], held: int = 0) -> tuple[T, Cost]:
    """Run work once and count its multiply-adds and the peak of live tensor bytes."""
    start = time.perf_counter()
    with Counter(held) as counter:
        result = work()
    return result, Cost(counter.flops // 2, counter.peak, time.perf_counter() - start)


class Meter:
    """Counts each kind of work once per shape and remembers it; seconds are taken every time."""

    def __init__(self) -> None:
        self._known: dict[Any, Cost] = {}

    def knows(self, key: Any) -> bool:
        """Say whether work of this key has been counted."""
        return key in self._known

    def run(self, key: Any, work: Callable[[], T], held: int = 0) -> tuple[T, Cost]:
        if key not in self._known:
            result, self._known[key] = measure(work, held)
            return result, self._known[key]
        start = time.perf_counter()
        result = work()
        return result, self._known[key]._replace(seconds=time.perf_counter() - start)
