"""How a batch holds the images of several tasks."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple


class Layout(NamedTuple):
    """What a batch holds: the images of how many tasks, and how many of each are a set apart."""

    tasks: int = 1
    first: int = 0


_ONE_TASK = Layout()
_layout: ContextVar[Layout] = ContextVar("layout", default=_ONE_TASK)


@contextmanager
def side_by_side(num_tasks: int, first: int = 0) -> Iterator[None]:
    """Let a batch hold the images of several tasks in turn, each with statistics of its own.

    The first images of each task may have others than the rest: a support set before its queries.
    """
    token = _layout.set(Layout(num_tasks, first))
    try:
        yield
    finally:
        _layout.reset(token)


def layout() -> Layout:
    """Return how the tasks of a batch lie."""
    return _layout.get()
