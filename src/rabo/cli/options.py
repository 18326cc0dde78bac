"""Options of experiments, algorithms and tasks as those of a command."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_args, get_type_hints

import typer

from rabo.algorithms import ALGORITHMS, ALIASES
from rabo.execution import RUNTIMES
from rabo.hypergradients import ESTIMATORS
from rabo.pruning.policies import POLICIES
from rabo.runs.experiment import Experiment
from rabo.runs.options import parse_option
from rabo.tasks import Task

KNOWN = {
    "algorithm": (*ALGORITHMS, *ALIASES),
    "runtime": ("auto", *RUNTIMES),
    "device": ("auto", "cpu", "cuda"),
    "aggregate": ("mean", "median", "trimmed"),
}


def _option(text: str, names: tuple[str, ...] = ()) -> Any:
    """Make an option with its help; the tab key completes names that are known."""
    if not names:
        return typer.Option(help=text)
    return typer.Option(
        help=text, autocompletion=lambda incomplete: [n for n in names if n.startswith(incomplete)]
    )


def algorithm_options(
    policy: Annotated[
        str | None,
        _option(f"which channels a client trains: {', '.join(POLICIES)}", tuple(POLICIES)),
    ] = None,
    hypergradient: Annotated[
        str | None,
        _option(f"instead of the algorithm's own: {', '.join(ESTIMATORS)}", tuple(ESTIMATORS)),
    ] = None,
    hessian: Annotated[str | None, typer.Option(help="local (the paper) or global")] = None,
    alpha: Annotated[
        float | None,
        typer.Option(
            help="outer step size; one that falls: "
            """--option 'alpha={"name": "cosine", "start": 0.3}'"""
        ),
    ] = None,
    beta: Annotated[str | None, typer.Option(help="inner step size, or auto")] = None,
    momentum: Annotated[float | None, typer.Option(help="of the inner steps")] = None,
    levels: Annotated[
        str | None, typer.Option(help="what a single-level algorithm trains: both, or y")
    ] = None,
    inner_steps: Annotated[int | None, typer.Option(help="inner steps T of a round")] = None,
    outer_steps: Annotated[
        int | None, typer.Option(help="steps on x that a client of rabo or rafbo takes in a round")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="any other option of the algorithm, as NAME=VALUE (num_terms=5)"),
    ] = None,
) -> dict[str, Any]:
    """Return what was given of the options that most algorithms have."""
    others = dict(map(_parse_option, option or []))
    flags = {
        "policy": policy,
        "hypergradient": hypergradient,
        "hessian": hessian,
        "alpha": alpha,
        "beta": beta if beta in (None, "auto") else _number("beta", beta),
        "momentum": momentum,
        "levels": levels,
        "num_inner_steps": inner_steps,
        "num_outer_steps": outer_steps,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    if twice := others.keys() & given.keys():
        raise typer.BadParameter(f"{', '.join(sorted(twice))} must be given once, got two values")
    return {**others, **given}


def _parse_option(text: str) -> tuple[str, Any]:
    try:
        return parse_option(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{name} must be a number or auto, got {text!r}") from None


def command_for(name: str, kind: type[Task], action: Callable[..., None]) -> Callable[..., None]:
    """Make `rabo run NAME` or `rabo compare NAME`, with the options of all that take part."""
    of_action = _parameters_of(action, "experiment")
    replaced = "algorithm" if any(p.name == "algorithms" for p in of_action) else ""
    of_run = _fields_of(Experiment, "task", "task_options", "algorithm_options", replaced)
    of_algorithm, of_task = _parameters_of(algorithm_options), _fields_of(kind)

    def command(**options: Any) -> None:
        def given(parameters: list[inspect.Parameter]) -> dict[str, Any]:
            return {p.name: options[p.name] for p in parameters}

        experiment = Experiment(
            task=name,
            task_options=given(of_task),
            algorithm_options=algorithm_options(**given(of_algorithm)),
            **given(of_run),
        )
        action(experiment, **given(of_action))

    shown = [*of_action, *of_run, *of_algorithm, *of_task]
    command.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in shown}
    command.__doc__ = kind.__doc__
    return command


def _fields_of(kind: Any, *without: str) -> list[inspect.Parameter]:
    """Turn the fields of a dataclass, Annotated with what they mean, into options."""
    hints = get_type_hints(kind, include_extras=True)
    found = []
    for option in fields(kind):
        if option.name in without:
            continue
        plain, text = get_args(hints[option.name])[:2]
        annotation = Annotated[plain, _option(text, KNOWN.get(option.name, ()))]
        default = option.default if option.default is not MISSING else ...
        found.append(_parameter(option.name, default, annotation))
    return found


def _parameters_of(function: Callable[..., Any], *without: str) -> list[inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return [
        _parameter(p.name, p.default, p.annotation) for p in parameters if p.name not in without
    ]


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)
