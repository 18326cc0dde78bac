"""What a client builds from the options of a run, once in a process that lives on."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from rabo.algorithms import Algorithm
from rabo.exchange.budgets import Resources
from rabo.flower.options import experiment_of
from rabo.flower.worker import Worker
from rabo.tasks import Setup

recent: tuple[str, Sequence[Sequence[Any]], int, str] | None = None  # what was asked for last


def recall(
    folder: str, options: Sequence[Sequence[Any]], client: int, device: str
) -> tuple[Worker, Resources]:
    """Return a client and what the run says it has."""
    global recent
    recent = (folder, options, client, device)
    return _site(folder, tuple((name, value) for name, value in options), client, device)


@lru_cache(maxsize=64)
def _site(
    folder: str, options: tuple[tuple[str, Any], ...], client: int, device: str
) -> tuple[Worker, Resources]:
    setup, algorithm = _built(folder, options, device)
    own = setup.clients[client]
    _ = own.problem.channels  # found, and proved, on first use
    return Worker(client, own.problem, algorithm), own.capacity


@lru_cache(maxsize=1)
def _built(
    folder: str, options: tuple[tuple[str, Any], ...], device: str
) -> tuple[Setup, Algorithm]:
    experiment = experiment_of(dict(options), Path(folder))
    return replace(experiment, device=device or experiment.device).build()
