"""What a client builds from the options of a run, once in a process that lives on."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from rabo.algorithms import Algorithm
from rabo.errors import lookup
from rabo.exchange.budgets import Resources
from rabo.flower.worker import Worker
from rabo.runs.experiment import Experiment
from rabo.tasks import TASKS, Setup

recent: tuple[str, Sequence[Sequence[Any]], int, str] | None = None  # what was asked for last


def recall(
    folder: str, options: Sequence[Sequence[Any]], client: int, device: str
) -> tuple[Worker, Resources]:
    """Return a client and what the run says it has."""
    global recent
    recent = (folder, options, client, device)
    return _site(folder, tuple((name, value) for name, value in options), client, device)


def experiment_of(config: Mapping[str, Any], folder: Path) -> Experiment:
    """Read the options of a run; none is written "" or 0. A file lies in the app's folder."""
    of_run: dict[str, Any] = {
        option.name: config[key] or (None if option.default is None else config[key])
        for option in fields(Experiment)
        if (key := option.name.replace("_", "-")) in config
    }
    kind = lookup("task", of_run["task"], TASKS)
    of_run["task_options"] = parse_options(of_run["task_options"], kind)
    of_run["algorithm_options"] = parse_options(of_run["algorithm_options"])
    if "file" in of_run["task_options"]:
        of_run["task_options"]["file"] = str(folder / of_run["task_options"]["file"])
    return Experiment(**of_run)


def parse_options(text: str, kind: type | None = None) -> dict[str, Any]:
    """Read "ways=5 backbone=conv4", with the types of a task's fields or as they look."""
    hints = get_type_hints(kind, include_extras=True) if kind else {}
    known = (
        {option.name: get_args(hints[option.name])[0] for option in fields(kind)} if kind else {}
    )
    options: dict[str, Any] = {}
    for item in text.split():
        name, equals, value = item.partition("=")
        name = name.replace("-", "_")
        if not equals:
            raise ValueError(f"options must look like name=value, got {item!r}")
        plain = lookup("option", name, known) if kind else None
        options[name] = value if plain is str else _plain(value)
    return options


def _plain(value: str) -> Any:
    """Return a number or a truth value where the text is one."""
    try:
        return json.loads(value)
    except ValueError:
        return value


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
