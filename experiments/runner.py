"""Do work items in several processes; repeat those that lack memory with fewer at a time."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import torch

from experiments.theory.literal import register
from rabo.execution.room import share_device

Item = TypeVar("Item")
Found = TypeVar("Found")
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "alloc_failed")  # in untyped errors
CONTEXT = multiprocessing.get_context("spawn")  # CUDA cannot be forked
_stop: Any = None  # the event that stops this process, where it works for another


def perform_all(
    work: Callable[[Item], Found], items: Sequence[Item], jobs: int
) -> Generator[tuple[Item, Found | Exception]]:
    """Yield each item with its result or its error, as they end.

    With one job the items run in this process, else each in a process of its own. Items that run
    out of memory, or whose process was killed, are repeated at the end with half as many jobs, down
    to one. Their share of the device stays the same, because results may depend on it.
    """
    if jobs == 1:
        for item in items:
            yield item, _attempt(work, item)
        return
    waiting, at_once = list(items), min(jobs, len(items))
    while waiting:
        again = []
        for item, found in _at_once(work, waiting, at_once, jobs):
            if at_once > 1 and isinstance(found, Exception) and lacks_memory(found):
                again.append(item)
            else:
                yield item, found
        waiting, at_once = again, max(1, at_once // 2)
        if again:
            print(f"out of memory: {len(again)} runs again, {at_once} at a time", flush=True)


def _attempt(work: Callable[[Item], Found], item: Item) -> Found | Exception:
    try:
        return work(item)
    except Exception as error:
        return error


def _at_once(
    work: Callable[[Item], Found], items: Sequence[Item], number: int, share: int
) -> Generator[tuple[Item, Found | Exception]]:
    """Yield each item with its result or its error; each of the threads waits for one process.

    When this ends early, as by Ctrl-C, the processes finish their round and save a checkpoint.
    """
    stop = CONTEXT.Event()
    threads = ThreadPoolExecutor(number, initializer=_block_interrupts)
    try:
        futures = {threads.submit(_alone, work, item, stop, share): item for item in items}
        for future in as_completed(futures):
            yield futures[future], _attempt(lambda f: f.result(), future)
    finally:
        stop.set()
        threads.shutdown(cancel_futures=True)


def _block_interrupts() -> None:
    """Let the processes that this thread starts ignore Ctrl-C: this process stops them."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _alone(work: Callable[[Item], Found], item: Item, stop: Any, share: int) -> Found:
    """Do one item in a process of its own, which returns all its memory."""
    with ProcessPoolExecutor(1, CONTEXT, _begin, (stop, share)) as pool:
        return pool.submit(_work_or_exit, work, item).result()


def _work_or_exit(work: Callable[[Item], Found], item: Item) -> Found:
    """Do an item; end this process if the one that waits for the result has died."""
    try:
        return work(item)
    finally:
        if not _parent_lives():
            os._exit(1)


def _parent_lives() -> bool:
    parent = multiprocessing.parent_process()
    return parent is not None and parent.is_alive()


def _begin(stop: Any, share: int) -> None:
    """Prepare a process that shares cores and device with others."""
    global _stop
    _stop = stop
    register()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // share))
    share_device(share)


def lacks_memory(error: BaseException | None) -> bool:
    """Tell whether an error, or its cause, is about memory, or a process was killed."""
    if error is None:
        return False
    if isinstance(error, (torch.OutOfMemoryError, MemoryError, BrokenProcessPool)):
        return True
    if isinstance(error, RuntimeError) and any(t in str(error).lower() for t in OUT_OF_MEMORY):
        return True
    return lacks_memory(error.__cause__ or error.__context__)


class StopBetweenRounds:
    """A run observer that interrupts a run when it is to stop, or its parent process has died."""

    def begin(self, start: Any) -> None:
        pass

    def add(self, done: Any) -> None:
        if _stop is not None and (_stop.is_set() or not _parent_lives()):
            raise KeyboardInterrupt

    def end(self, status: str) -> None:
        pass
