"""The grid of an experiment: frozen JSON files become named runs.

A file has what all runs share (`experiment`), `settings` and `methods`, each with what it changes
(`run`), and the paper's numbers. `tuned` names the family of settings that tuning has chosen; a
setting may have one of its own, for methods that were tuned for it, and a method one that it has in
all settings. A method with `settings_of` has those that were chosen for another. `extends` names a
file that it adds to, `runs` one whose runs it shows.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rabo.errors import lookup
from rabo.runs.experiment import Experiment
from rabo.tasks import TASKS

NESTED = ("task_options", "algorithm_options")
EVALUATIONS = 10  # in a run, about
TUNED = "tuned.json"


@dataclass(frozen=True)
class Run:
    """One cell of a grid, for one seed."""

    setting: str
    method: str
    experiment: Experiment
    folder: str  # below the folder of results

    @property
    def name(self) -> str:
        return _name(self.setting, self.method, self.experiment.seed)


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What is asked for of a grid beside what its file says."""

    rounds: int | None = None
    seeds: int | None = None
    device: str = "auto"
    task_options: Mapping[str, Any] | None = None
    only: Sequence[str] = ()  # patterns of names: SETTING/METHOD/seed-N

    def __post_init__(self) -> None:
        for name in ("rounds", "seeds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def told(self) -> str:
        """Write what makes other runs than the file's, as a reader likes it."""
        rounds = {"rounds": self.rounds} if self.rounds is not None else {}
        return describe({**rounds, **(self.task_options or {})})


@dataclass(frozen=True)
class Grid:
    """An experiment of the paper, or beyond it, as its file says."""

    name: str
    content: Mapping[str, Any]
    tuned: Mapping[str, Mapping[str, Mapping[str, Any]]]  # family -> method -> algorithm options

    @property
    def runs_of(self) -> str:
        """The grid whose runs are shown."""
        return self.content.get("runs_of", self.name)

    @property
    def settings(self) -> Mapping[str, Mapping[str, Any]]:
        return self.content["settings"]

    def methods(self, setting: str) -> Mapping[str, Mapping[str, Any]]:
        """Return the methods of a setting, which may have its own."""
        return self.settings[setting].get("methods", self.content.get("methods", {}))

    def runs(self, changes: Changes | None = None) -> list[Run]:
        """Return all runs, a seed of all methods before the next seed."""
        changes = changes or Changes()
        seeds = self.content["seeds"] if changes.seeds is None else changes.seeds
        return [
            self._run(setting, method, seed, changes)
            for seed in range(seeds)
            for setting in self.settings
            for method in self.methods(setting)
            if _is_chosen(_name(setting, method, seed), changes.only)
        ]

    def _run(self, setting: str, method: str, seed: int, changes: Changes) -> Run:
        own_setting, own_method = self.settings[setting], self.methods(setting)[method]
        options = merge(
            self.content["experiment"],
            {
                "algorithm_options": self._chosen_by_tuning(
                    own_setting, own_method, own_method.get("settings_of", method)
                )
            },
            own_setting.get("run", {}),
            own_method.get("run", {}),
        )
        options = merge(options, {"task_options": _as_options(options["task"], changes)})
        rounds = changes.rounds or options["rounds"]
        own = {"rounds": rounds, "device": changes.device, "seed": seed}
        options = {"evaluate_every": max(1, rounds // EVALUATIONS), **options, **own}
        folder = own_setting.get("folder", f"{self.runs_of}/{setting}")
        return Run(setting, method, Experiment(**options), f"{folder}/{method}/seed-{seed}")

    def _chosen_by_tuning(
        self, setting: Mapping[str, Any], about: Mapping[str, Any], method: str
    ) -> Mapping[str, Any]:
        """Return what was chosen for a setting that has its own tuning, else for all."""
        if "candidates" in self.content:
            return {}
        places = (about,) if "tuned" in about else (self.content, setting)
        families = [where["tuned"] for where in places if "tuned" in where]
        known = [chosen[method] for f in families if method in (chosen := self.tuned.get(f, {}))]
        return known[-1] if known else {}


def _as_options(task: str, changes: Changes) -> dict[str, Any]:
    """Return options of a task that were given as text: a number may be meant as text there."""
    texts = {f.name for f in fields(TASKS[task]) if isinstance(f.default, str)}  # type: ignore[arg-type]
    given = (changes.task_options or {}).items()
    return {name: str(value) if name in texts else value for name, value in given}


def check_options(runs: Iterable[Run]) -> None:
    """Refuse options that the task of a run does not have."""
    for run in runs:
        task = run.experiment.task
        known = {f.name: f for f in fields(TASKS[task])}  # type: ignore[arg-type]
        for name in run.experiment.task_options:
            lookup(f"option of {task}", name, known)


def _name(setting: str, method: str, seed: int) -> str:
    return f"{setting}/{method}/seed-{seed}"


def _is_chosen(name: str, patterns: Sequence[str]) -> bool:
    """Say whether a pattern is that of a name, or of its beginning up to a slash."""
    return not patterns or any(
        fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}/*") for pattern in patterns
    )


def merge(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Let later parts win, option by option; what an option is, is replaced as a whole."""
    merged: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            merged[name] = {**merged.get(name, {}), **value} if name in NESTED else value
    return merged


def experiments_folder() -> Path:
    """Return where the files are: in an installed package, or at the root of the repository."""
    package = Path(__file__).parents[1]
    installed = package / "experiments"
    return installed if installed.exists() else package.parents[1] / "experiments"


def known_grids(folder: Path | None = None) -> list[str]:
    """Return the names of all files that show something."""
    paths = sorted((folder or experiments_folder()).glob("*.json"))
    return [path.stem for path in paths if "shows" in json.loads(path.read_text())]


def load_grid(name: str, tuned: Path | None = None, folder: Path | None = None) -> Grid:
    """Read a grid, with the settings that tuning has chosen so far."""
    folder = folder or experiments_folder()
    lookup("experiment", name, dict.fromkeys(known_grids(folder)))
    content = _read(name, folder)
    path = tuned or folder / TUNED
    chosen = json.loads(path.read_text()) if path.exists() else {}
    if "candidates" in content:
        content = _with_candidates(content)
    return Grid(name, content, chosen)


def _read(name: str, folder: Path) -> dict[str, Any]:
    own = json.loads((folder / f"{name}.json").read_text())
    if "runs" in own:
        base = _read(own["runs"], folder)
        return {**base, "paper": {}, "runs_of": own["runs"], **_chosen_methods(base, own)}
    if "extends" not in own:
        return own
    base = _read(own["extends"], folder)
    experiment = merge(base["experiment"], own.get("experiment", {}))
    return {**base, **_chosen_methods(base, own), "experiment": experiment}


def _chosen_methods(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Let a list of names choose from the methods of the base."""
    names = own.get("methods")
    if not isinstance(names, list):
        return dict(own)
    return {**own, "methods": {name: base["methods"][name] for name in names}}


def _with_candidates(content: Mapping[str, Any]) -> dict[str, Any]:
    """Make every method a setting and its candidates the methods there: as many for each."""
    candidates: Mapping[str, Sequence[Mapping[str, Any]]] = content["candidates"]
    sizes = {kind: len(each) for kind, each in candidates.items()}
    if len(set(sizes.values())) != 1:
        raise ValueError(f"all methods must have as many candidates, got {sizes}")

    def tried(options: Mapping[str, Any]) -> dict[str, Any]:
        return {"label": describe(options), "run": {"algorithm_options": options}}

    settings = {
        name: {
            **method,
            "methods": {
                f"candidate-{i}": tried(options)
                for i, options in enumerate(candidates[method["kind"]], start=1)
            },
        }
        for name, method in content["methods"].items()
    }
    return {**content, "settings": settings}


def describe(options: Mapping[str, Any]) -> str:
    """Write options as a reader likes them."""

    def text(value: Any) -> str:
        if isinstance(value, Mapping):
            own = [f"{k} {text(v)}" for k, v in value.items() if k != "name"]
            return " ".join([str(value["name"]), *own])
        return f"{value:g}" if isinstance(value, float) else str(value)

    named = (
        f"{name.replace('num_', '').replace('_', ' ')} {text(v)}" for name, v in options.items()
    )
    return ", ".join(named)


def part_of(runs: Iterable[Run], part: tuple[int, int]) -> list[Run]:
    """Return the k-th of n parts, so that n processes share the runs."""
    k, n = part
    return [run for i, run in enumerate(runs) if i % n == k - 1]
