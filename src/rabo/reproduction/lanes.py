"""Runs side by side, each in one of some processes: what they compute leaves a GPU mostly idle."""

import copy
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Container, Generator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch

from rabo.runtimes.room import share_device

PATIENCE = 60  # seconds that a run which is stopped has to write what it has reached


class _Lane(NamedTuple):
    process: Any
    end: Connection


def side_by_side(
    do: Callable[[Any], str], items: Sequence[Any], number: int, may_begin: Callable[[], bool]
) -> Generator[tuple[Any, str | Exception], None, None]:
    """Do items in some processes; give each with what its work returned or raised, as it ends.

    As long as `may_begin` says so, and not every process has seen an error, one that is done begins
    the next. Ctrl-C, or the end of this process, stops all; what they have reached is kept.
    """
    number, waiting, errors = min(number, len(items)), list(items), 0
    lanes = [_open(do, number) for _ in range(number)]
    free: list[Any] = [lane.end for lane in lanes]
    busy: dict[Any, Any] = {}
    try:
        while True:
            while free and waiting and errors < number and may_begin():
                end, item = free.pop(), waiting.pop(0)
                end.send(item)
                busy[end] = item
            if not busy:
                return
            for end in wait(list(busy)):
                item = busy.pop(end)
                answer = _answer(end, item)
                errors += isinstance(answer, Exception)
                if not isinstance(answer, LostError):
                    free.append(end)
                yield item, answer
    finally:
        _close(lanes, busy)


class LostError(OSError):
    """A process ended before its work did."""


def _open(do: Callable[[Any], str], number: int) -> _Lane:
    context = multiprocessing.get_context("spawn")  # CUDA cannot be forked
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, do, number), daemon=True)
    process.start()
    there.close()
    return _Lane(process, here)


def _answer(end: Any, item: Any) -> Any:
    try:
        return end.recv()
    except EOFError:
        return LostError(
            f"the process of {item.name} ended; it may have run out of memory: try fewer --jobs"
        )


def _close(lanes: Sequence[_Lane], busy: Container[Any]) -> None:
    """Stop every process that works once, and wait for what it writes; others end by themselves."""
    for process, end in lanes:
        if end in busy:
            process.terminate()
        end.close()
    for process, _ in lanes:
        process.join(PATIENCE)


def _serve(end: Connection, do: Callable[[Any], str], number: int) -> None:
    """Do what is sent until nothing comes any more, as one of some that share this machine."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal tells all; who has begun us tells us
    signal.signal(signal.SIGTERM, _stop)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // number))
    share_device(number)
    try:
        while True:
            end.send(_outcome(do, end.recv()))
    except (EOFError, KeyboardInterrupt, BrokenPipeError):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _outcome(do: Callable[[Any], str], item: Any) -> Any:
    try:
        return do(item)
    except Exception as error:
        error.add_note(f"In {item.name}:\n{traceback.format_exc()}")
        return _as_can_be_sent(error)


def _as_can_be_sent(error: Exception) -> Exception:
    try:
        return copy.copy(error)  # made anew, as at the other end of a pipe
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def _stop(*_: Any) -> None:
    raise KeyboardInterrupt
