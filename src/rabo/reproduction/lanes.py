"""Runs side by side, each in one of some processes that stop, fail and are told of one by one."""

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch

from rabo.execution.room import share_device
from rabo.reproduction.literal import register

MISTAKES = (ValueError, ImportError, FileNotFoundError)  # of which another run has no better chance
LATER = "it may have run out of memory: it is done again after all others, with fewer beside it"
FULL = ("out of memory", "can't allocate memory", "alloc_failed")  # of errors without a type
PATIENCE = 60  # seconds that runs which are stopped have to write what they have reached


class Failure(NamedTuple):
    """Why a run failed, where, and by which mistake, if what was asked for is to blame.

    One that may have lacked memory has a better chance with fewer others beside it.
    """

    why: str
    traceback: str = ""
    mistake: type[Exception] | None = None
    may_lack_memory: bool = False


class Note(NamedTuple):
    """What an item's work says while it is under way."""

    text: str


Tell = Callable[[str], None]


class _Lane(NamedTuple):
    process: Any
    end: Any


Outcomes = Generator[tuple[Any, str | Note | Failure], None, Any]


def side_by_side(
    do: Callable[[Any, Tell], str], items: Sequence[Any], number: int, may_begin: Callable[[], bool]
) -> Outcomes:
    """Do items in some processes; give each with what its work returned, or why not, as it ends.

    Before that it comes with every note that its work has told.

    A process that is done begins the next item as long as `may_begin` says so; one whose item
    failed makes way for a new one. Items that may have lacked memory are done again when all others
    have ended, half as many at a time, down to one. After a mistake of the user's, or as many other
    failures in a row as there are processes, none begins. Ctrl-C, or the end of this process, stops
    all; what they have reached is kept.
    """
    start = partial(_open, do, min(number, len(items)))  # its share of the device never changes
    while items:
        items = yield from _at_a_time(number, items, start, may_begin)
        number //= 2


def _at_a_time(
    number: int, items: Sequence[Any], start: Callable[[], _Lane], may_begin: Callable[[], bool]
) -> Outcomes:
    """Do items in so many processes at a time; return those to be done again in fewer."""
    waiting, failures, is_over = list(items), 0, False
    again: list[Any] = []
    free: list[_Lane] = []
    busy: dict[Any, tuple[_Lane, Any]] = {}
    try:
        while True:
            while waiting and len(busy) < number and not is_over and may_begin():
                lane = free.pop() if free else start()
                busy[lane.end] = lane, waiting.pop(0)
                _send(lane, busy[lane.end][1])
            if not busy:
                return [] if is_over else again
            for end in wait(list(busy)):
                lane, item = busy[end]
                answer = _answer(lane)
                if isinstance(answer, Note):
                    yield item, answer
                    continue
                del busy[end]
                if not isinstance(answer, Failure):
                    failures = 0
                    free.append(lane)
                elif answer.may_lack_memory and number > 1:
                    again.append(item)
                    answer = Note(LATER)
                    _close([lane])
                else:
                    failures += 1
                    is_over = is_over or answer.mistake is not None or failures == number
                    _close([lane])
                yield item, answer
    finally:
        working = [lane for lane, _ in busy.values()]
        for lane in working:
            lane.process.terminate()
        _close([*free, *working])


def _open(do: Callable[[Any, Tell], str], number: int) -> _Lane:
    context = multiprocessing.get_context("spawn")  # CUDA cannot be forked
    here, there = context.Pipe()
    process: Any = context.Process(target=_serve, args=(there, do, number), daemon=True)
    with _deaf_children():
        process.start()
    there.close()
    return _Lane(process, here)


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Let a process that starts ignore Ctrl-C from its first line on: who begins it tells it."""
    if not hasattr(signal, "pthread_sigmask"):  # not everywhere
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _send(lane: _Lane, item: Any) -> None:
    try:
        lane.end.send(item)
    except OSError:
        lane.process.join()  # it has ended, as `_answer` will find


def _answer(lane: _Lane) -> str | Note | Failure:
    try:
        return lane.end.recv()
    except (EOFError, OSError):
        why = "its process ended; it may have run out of memory: try fewer --jobs"
        return Failure(why, may_lack_memory=True)


def _close(lanes: Iterable[_Lane]) -> None:
    """Let processes end, which those do that wait for work, and wait for what others write."""
    until, lanes = time.monotonic() + PATIENCE, list(lanes)
    for lane in lanes:
        lane.end.close()
    for lane in lanes:
        lane.process.join(max(0.0, until - time.monotonic()))
    for lane in lanes:
        if lane.process.is_alive():
            lane.process.kill()
            lane.process.join()


def _serve(end: Connection, do: Callable[[Any, Tell], str], number: int) -> None:
    """Do what is sent until nothing comes any more, as one of some that share this machine."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal tells all; who has begun us tells us
    register()
    signal.signal(signal.SIGTERM, _stop)
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // number))
    share_device(number)

    def tell(text: str) -> None:
        try:
            end.send(Note(text))
        except OSError:  # nobody is there any more
            raise KeyboardInterrupt from None

    try:
        while True:
            end.send(_outcome(do, end.recv(), tell))
    except (EOFError, KeyboardInterrupt, OSError):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _stop_with_parent() -> None:
    parent: Any = multiprocessing.parent_process()
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


def _outcome(do: Callable[[Any, Tell], str], item: Any, tell: Tell) -> str | Failure:
    try:
        return do(item, tell)
    except Exception as error:
        mistake = next((kind for kind in MISTAKES if isinstance(error, kind)), None)
        why = str(error) or type(error).__name__
        return Failure(why, traceback.format_exc(), mistake, _may_lack_memory(error))


def _may_lack_memory(error: BaseException | None) -> bool:
    """Say whether an error, or one that it came from, is about memory, of the device or here."""
    if error is None:
        return False
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, RuntimeError) and any(each in str(error).lower() for each in FULL):
        return True
    return _may_lack_memory(error.__cause__ or error.__context__)


_stopping = threading.Event()


def _stop(*_: Any) -> None:
    _stopping.set()
    raise KeyboardInterrupt


class Heed:
    """A writer that ends a run between two rounds, if Python has swallowed what was to stop it.

    It does so with whatever is raised while an object dies.
    """

    def begin(self, start: Any) -> None:
        pass

    def add(self, done: Any) -> None:
        if _stopping.is_set():
            raise KeyboardInterrupt

    def end(self, status: str) -> None:
        pass
