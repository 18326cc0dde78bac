"""Work on tensors that stay in place, played again: as a CUDA graph, or on a CPU by running it."""

import time
import warnings
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rabo.tree import Params, block, leaves, pieces


class SharedPool:
    """Memory for what graphs need only while they run, and the stream on which they take turns.

    It lasts as long as its graphs, so it keeps them all.
    """

    def __init__(self) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []

    @cached_property
    def handle(self) -> Any:
        return torch.cuda.graph_pool_handle()

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()


class GraphPlayer:
    """A CUDA graph on a stream of its own, with its own memory unless it gets some to share."""

    def __init__(self, priority: int, shared: SharedPool | None = None) -> None:
        self._shared = shared
        self._stream = shared.stream if shared else torch.cuda.Stream(priority=priority)
        self._graph = torch.cuda.CUDAGraph()
        self._ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def record(self, run: Callable[[], Any]) -> Any | None:
        self._stream.wait_stream(torch.cuda.current_stream())
        _refuse_reads()
        try:
            with torch.cuda.stream(self._stream):
                run()  # warm up, and see whether it reads the device
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            return None
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.current_stream().wait_stream(self._stream)
        pool = None
        if self._shared:
            self._shared.graphs.append(self._graph)
            pool = self._shared.handle
        with torch.cuda.graph(self._graph, stream=self._stream, pool=pool):
            self._inside = run()
        self._found = outside(self._inside) if self._shared else self._inside
        return self._found

    def replay(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._ends[0].record()
            self._graph.replay()
            if self._shared:  # the next graph may write where this one has put its results
                copy_tree(self._found, self._inside)
            self._ends[1].record()

    def join(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)

    def seconds(self) -> float:
        """Return what the last replay took; call it when the device has been read."""
        return self._ends[0].elapsed_time(self._ends[1]) / 1000


def _refuse_reads() -> None:
    """Let every read of the device raise; torch warns that not all may, which is well known."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
        torch.cuda.set_sync_debug_mode("error")


class Rerun:
    """What stands for a graph on a CPU: the same work on the same static tensors, run again."""

    def record(self, run: Callable[[], Any]) -> Any:
        self._run, self._found = run, run()
        return self._found

    def replay(self) -> None:
        start = time.perf_counter()
        copy_tree(self._found, self._run())
        self._seconds = time.perf_counter() - start

    def join(self) -> None:
        pass

    def seconds(self) -> float:
        return self._seconds


def outside(tree: Any) -> Any:
    """Copy results to memory of their own, named tensors as pieces of one vector."""
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, Mapping):
        if tree and all(isinstance(each, Tensor) for each in tree.values()):
            return as_block(tree)
        return {key: outside(each) for key, each in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(outside, tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map(outside, tree))
    return tree


def as_block(params: Params) -> dict[str, Tensor]:
    """Copy tensors into pieces of one vector, if they have one type."""
    if len({t.dtype for t in params.values()}) != 1:
        return {name: value.detach().clone() for name, value in params.items()}
    flat = torch.cat([value.detach().reshape(-1) for value in params.values()])
    return pieces(flat, {name: value.shape for name, value in params.items()})


def copy_tree(into: Any, source: Any) -> None:
    """Copy tensors to where others are, all with few launches."""
    whole, other = block(leaves(into)), block(leaves(source))
    if whole is not None and other is not None:
        whole.copy_(other, non_blocking=True)
        return
    pairs = zip(leaves(into), leaves(source), strict=True)
    pairs = [(a, b) for a, b in pairs if a.data_ptr() != b.data_ptr()]
    if pairs:
        here, there = [a for a, _ in pairs], [b for _, b in pairs]
        torch._foreach_copy_(here, there, non_blocking=True)  # pyright: ignore[reportPrivateImportUsage]
