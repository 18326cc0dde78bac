"""Options of a run on a federation: from the command line to the app's run config, and back."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from rabo.errors import lookup
from rabo.federation.solve import make_algorithm, over_all
from rabo.flower.launch import APP, HOME
from rabo.runs.experiment import Experiment
from rabo.tasks import TASKS


@dataclass(frozen=True, kw_only=True)
class FlowerOptions:
    """Options that only a federation on real machines has."""

    deadline: Annotated[float, "seconds for an exchange; the round goes on without late clients"]
    min_clients: Annotated[int, "nodes that must have joined to begin; 0: all"]
    wait: Annotated[float, "seconds to wait for them, and for --min-replies in any round"]
    repeatable_noise: Annotated[bool, "draw the clients' noise from --seed: not private"]
    compare: Annotated[bool, "each node runs one round with the full model, to compare costs"]
    out: Annotated[str, "run folder, on the server (runs/flower-ID)"]
    resume: Annotated[bool, "continue the run in --out from its last checkpoint"]


def app_config(folder: Path) -> dict[str, Any]:
    """Return the options of the app, with their defaults."""
    project = tomllib.loads((folder / APP / "pyproject.toml").read_text())
    return project["tool"]["flwr"]["app"]["config"]


def run_config(
    folder: Path,
    task: str,
    given: Mapping[str, Any],
    task_options: Mapping[str, Any],
    algorithm_options: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what the command line changes in the app's options; refuse what cannot run."""
    plain = app_config(folder)
    chosen = {name.replace("_", "-"): value for name, value in given.items()}
    own = parse_options(plain["task-options"], TASKS[task]) if task == plain["task"] else {}
    if task == "own":
        own = {"file": "problem.py", **own}
    options = parse_options(plain["algorithm-options"])
    chosen |= {
        "task": task,
        "task-options": json.dumps({**own, **task_options}),
        "algorithm-options": json.dumps({**options, **algorithm_options}),
    }
    for name in chosen:
        lookup(f"option of the app in {folder / APP}", name, plain)
    _check(experiment_of({**plain, **chosen}, folder / APP))
    return chosen


def _check(experiment: Experiment) -> None:
    options = over_all(experiment.rounds, experiment.algorithm_options)
    make_algorithm(experiment.algorithm, **options)


def write_config(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write the options of a run to a file that `flwr run --run-config` reads."""
    path = folder / HOME / "run.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in config.items())
    path.write_text("\n".join(lines) + "\n")
    return path


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
    """Read "ways=5 backbone=conv4" with the types of a task's fields, or an object of JSON."""
    if text.startswith("{"):
        return json.loads(text)
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
