"""A grid of runs: settings × methods × seeds."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any

from rabo.errors import lookup
from rabo.runs.experiment import Experiment
from rabo.tasks import TASKS

Options = Mapping[str, Any]  # of an Experiment; later options win
NESTED = ("task_options", "algorithm_options")  # merged option by option
NUM_EVALUATIONS = 10  # of a run, by default


@dataclass(frozen=True, kw_only=True)
class Method:
    """A row of a table: an algorithm with options."""

    label: str
    run: Options
    paper: str = ""  # its name in the paper's tables
    tuned_as: str = ""  # take the tuned options of this method, by default its own


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A column of a table: options that all its methods share."""

    label: str
    run: Options = field(default_factory=dict)
    methods: Mapping[str, Method] | None = None  # by default those of the grid
    tuned: Mapping[str, Options] | None = None  # by default those of the grid
    paper: Mapping[str, float] = field(default_factory=dict)  # the paper's numbers, by name
    coverage: Mapping[str, int] = field(default_factory=dict)  # the coverage that runs must have


@dataclass(frozen=True)
class Run:
    """One method in one setting with one seed."""

    grid: str
    setting: str
    method: str
    experiment: Experiment

    @property
    def seed(self) -> int:
        return self.experiment.seed

    @property
    def name(self) -> str:
        return f"{self.setting}/{self.method}/seed-{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Choices of the command line that replace those of a grid."""

    rounds: int | None = None
    seeds: int | None = None
    device: str = "auto"
    task_options: Options = field(default_factory=dict)
    only: Sequence[str] = ()  # patterns of SETTING/METHOD/seed-N

    def __post_init__(self) -> None:
        for name in ("rounds", "seeds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """An experiment: the runs of one `runs.jsonl`."""

    name: str
    title: str
    base: Options
    settings: Mapping[str, Setting]
    methods: Mapping[str, Method] = field(default_factory=dict)
    seeds: int = 3
    tuned: Mapping[str, Options] = field(default_factory=dict)  # method -> algorithm options
    settings_are_rows: bool = False  # in the table

    def methods_of(self, setting: str) -> Mapping[str, Method]:
        """Return the methods of a setting."""
        own = self.settings[setting].methods
        return self.methods if own is None else own

    def runs(self, changes: Changes | None = None) -> list[Run]:
        """Return all runs, one seed of all methods before the next seed."""
        changes = changes or Changes()
        names = [
            (setting, method, seed)
            for seed in range(changes.seeds or self.seeds)
            for setting in self.settings
            for method in self.methods_of(setting)
        ]
        chosen = [each for each in names if _matches("{}/{}/seed-{}".format(*each), changes.only)]
        if not chosen:
            one = "{}/{}/seed-{}".format(*names[0])
            raise ValueError(f"only must match a run such as {one}, got {list(changes.only)}")
        return [self._run(*each, changes) for each in chosen]

    def _run(self, setting: str, method: str, seed: int, changes: Changes) -> Run:
        column, row = self.settings[setting], self.methods_of(setting)[method]
        tuned = self.tuned if column.tuned is None else column.tuned
        options = merge(
            self.base,
            {"algorithm_options": tuned.get(row.tuned_as or method, {})},
            column.run,
            row.run,
        )
        options = merge(
            options, {"task_options": _read_options(options["task"], changes.task_options)}
        )
        rounds = changes.rounds or options["rounds"]
        own = {"rounds": rounds, "device": changes.device, "seed": seed}
        evaluate_every = max(1, rounds // NUM_EVALUATIONS)
        experiment = Experiment(**{"evaluate_every": evaluate_every, **options, **own})
        return Run(self.name, setting, method, experiment)


def merge(*parts: Options) -> dict[str, Any]:
    """Merge options; later parts win, and nested options are merged one by one."""
    merged: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            merged[name] = {**merged.get(name, {}), **value} if name in NESTED else value
    return merged


def restrict(methods: Mapping[str, Method], names: Iterable[str]) -> dict[str, Method]:
    """Return some of the methods, in the given order."""
    return {name: methods[name] for name in names}


def describe(options: Options) -> str:
    """Format options for display."""

    def text(value: Any) -> str:
        if isinstance(value, Mapping):
            own = [f"{k} {text(v)}" for k, v in value.items() if k != "name"]
            return " ".join([str(value["name"]), *own])
        return f"{value:g}" if isinstance(value, float) else str(value)

    return ", ".join(
        f"{name.replace('num_', '').replace('_', ' ')} {text(value)}"
        for name, value in options.items()
    )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Match a name, or its beginning up to a slash, with one of the patterns."""
    return not patterns or any(
        fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}/*") for pattern in patterns
    )


def _read_options(task: str, given: Options) -> dict[str, Any]:
    """Check that the task has the given options; keep text where a field is text."""
    known = {f.name: f for f in fields(TASKS[task])}  # type: ignore[arg-type]
    options = {}
    for name, value in given.items():
        own = lookup(f"option of {task}", name, known)
        options[name] = str(value) if isinstance(own.default, str) else value
    return options
