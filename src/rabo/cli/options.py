"""Fields of dataclasses as the options of a command."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperGroup

from rabo.algorithms import ALGORITHMS, ALIASES
from rabo.execution import RUNTIMES
from rabo.hypergradients import ESTIMATORS
from rabo.pruning.policies import POLICIES
from rabo.runs.experiment import Experiment
from rabo.runs.options import parse_option
from rabo.tasks import TASKS

# values that the tab key completes
KNOWN: dict[str, Sequence[str]] = {
    "algorithm": (*ALGORITHMS, *ALIASES),
    "runtime": ("auto", *RUNTIMES),
    "device": ("auto", "cpu", "cuda"),
    "aggregate": ("mean", "median", "trimmed"),
    "policy": tuple(POLICIES),
    "hypergradient": tuple(ESTIMATORS),
    "hessian": ("local", "global"),
}
SET_ELSEWHERE = {Experiment: {"task", "task_options", "algorithm_options"}}  # not options


@dataclass(frozen=True, kw_only=True)
class AlgorithmOptions:
    """Options that most algorithms have."""

    policy: Annotated[
        str | None, f"selects the channels that a client trains: {', '.join(POLICIES)}"
    ] = None
    hypergradient: Annotated[
        str | None, f"replaces the algorithm's own estimator: {', '.join(ESTIMATORS)}"
    ] = None
    hessian: Annotated[str | None, "local (the paper) or global"] = None
    alpha: Annotated[
        float | None,
        "outer step size; for a schedule: "
        """--option 'alpha={"name": "cosine", "start": 0.3}'""",
    ] = None
    beta: Annotated[str | None, "inner step size, or auto"] = None
    momentum: Annotated[float | None, "of the inner steps"] = None
    levels: Annotated[str | None, "levels that a single-level algorithm trains: both, or y"] = None
    inner_steps: Annotated[int | None, "inner steps T of a round"] = None
    outer_steps: Annotated[
        int | None, "steps on x that a client of rabo or rafbo takes in a round"
    ] = None
    option: Annotated[
        list[str] | None, "any other option of the algorithm, as NAME=VALUE (num_terms=5)"
    ] = None

    def given(self) -> dict[str, Any]:
        """Return the options that were given, under the names that algorithms have for them."""
        try:
            others = dict(map(parse_option, self.option or []))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        flags = {
            "policy": self.policy,
            "hypergradient": self.hypergradient,
            "hessian": self.hessian,
            "alpha": self.alpha,
            "beta": self.beta if self.beta in (None, "auto") else _number("beta", self.beta),
            "momentum": self.momentum,
            "levels": self.levels,
            "num_inner_steps": self.inner_steps,
            "num_outer_steps": self.outer_steps,
        }
        given = {name: value for name, value in flags.items() if value is not None}
        if twice := others.keys() & given.keys():
            raise typer.BadParameter(
                f"{', '.join(sorted(twice))} must be given once, got two values"
            )
        return {**others, **given}


class TaskGroup(TyperGroup):
    """Commands by task. A Python file stands for the task `own` with that file."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, with_task(args))


def with_task(words: Sequence[str]) -> list[str]:
    """Turn `problem.py ...` into `own --file problem.py ...`."""
    is_file = bool(words) and words[0].endswith(".py")
    return ["own", "--file", *words] if is_file else list(words)


def task_command(
    task: str, action: Callable[..., None], *kinds: type, without: str = ""
) -> Callable[..., None]:
    """Make the command of a task: `action` takes an experiment and one value of each kind."""
    own = TASKS[task]

    def call(run: Any, algorithm: Any, own_options: Any, *others: Any) -> None:
        options = AlgorithmOptions(**algorithm).given()
        experiment = Experiment(
            task=task, task_options=own_options, algorithm_options=options, **run
        )
        action(experiment, *(kind(**o) for kind, o in zip(kinds, others, strict=True)))

    return command_of(call, Experiment, AlgorithmOptions, own, *kinds, about=own, without=without)


def command_of(
    action: Callable[..., None], *kinds: type, about: type, without: str = "", unset: bool = False
) -> Callable[..., None]:
    """Make a command with the fields of dataclasses as its options.

    `action` takes a dictionary of values for each dataclass. With `unset`, options have no
    defaults: those that are not given are None.
    """
    groups = [parameters_of(kind, without, unset) for kind in kinds]

    def command(**options: Any) -> None:
        action(*({p.name: options[p.name] for p in group} for group in groups))

    shown = [parameter for group in groups for parameter in group]
    command.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in shown}
    command.__doc__ = about.__doc__
    return command


def parameters_of(kind: Any, without: str = "", unset: bool = False) -> list[inspect.Parameter]:
    """Turn the fields of a dataclass, annotated with their help, into options."""
    hints = get_type_hints(kind, include_extras=True)
    left_out = SET_ELSEWHERE.get(kind, set()) | {without}
    found = []
    for option in fields(kind):
        if option.name in left_out:
            continue
        plain, text = get_args(hints[option.name])[:2]
        default = None if unset else ... if option.default is MISSING else option.default
        annotation = Annotated[plain | None if unset else plain, _option(option.name, text)]
        keyword = inspect.Parameter.KEYWORD_ONLY
        found.append(
            inspect.Parameter(option.name, keyword, default=default, annotation=annotation)
        )
    return found


def _option(name: str, text: str) -> Any:
    """Make an option with its help and the values that the tab key completes."""
    names = KNOWN.get(name, ())
    complete = (
        (lambda incomplete: [n for n in names if n.startswith(incomplete)]) if names else None
    )
    return typer.Option(help=text, autocompletion=complete)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{name} must be a number or auto, got {text!r}") from None
