"""The command line: parse, call, print."""

import contextlib
import ctypes
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from rabo.cli_bench import bench
from rabo.cli_compare import compare_task, list_algorithms
from rabo.experiment import Experiment, parse_option, recorded_experiment, resume, run
from rabo.federation import Result, Round
from rabo.hypergradients import ESTIMATORS
from rabo.masks import POLICIES
from rabo.tasks import TASKS, Task
from rabo.terminal import console, guarded
from rabo.theory import run_theory

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
app = typer.Typer(
    help="Federated bilevel optimisation on submodels that fit each client.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
run_app = typer.Typer(help="Run an algorithm on a task.", no_args_is_help=True)
app.add_typer(run_app, name="run")
compare_app = typer.Typer(help="Compare algorithms on a task.", no_args_is_help=True)
app.add_typer(compare_app, name="compare")
app.command("algorithms")(list_algorithms)
app.command()(bench)
if importlib.util.find_spec("flwr"):  # the extra rabo[flower]
    from rabo.flower.commands import app as flower_app

    app.add_typer(flower_app, name="flower")


def algorithm_options(
    policy: Annotated[
        str | None, typer.Option(help=f"which channels a client trains: {', '.join(POLICIES)}")
    ] = None,
    hypergradient: Annotated[
        str | None, typer.Option(help=f"instead of the algorithm's own: {', '.join(ESTIMATORS)}")
    ] = None,
    hessian: Annotated[str | None, typer.Option(help="local (the paper) or global")] = None,
    alpha: Annotated[float | None, typer.Option(help="outer step size")] = None,
    beta: Annotated[str | None, typer.Option(help="inner step size, or auto")] = None,
    momentum: Annotated[float | None, typer.Option(help="of the inner steps")] = None,
    levels: Annotated[
        str | None, typer.Option(help="what a single-level algorithm trains: both, or y")
    ] = None,
    inner_steps: Annotated[int | None, typer.Option(help="inner steps T of a round")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="any other option of the algorithm, as NAME=VALUE (num_terms=5)"),
    ] = None,
) -> dict[str, Any]:
    """Return what was given of the options that most algorithms have."""
    given = {
        **dict(map(_parse_option, option or [])),
        "policy": policy,
        "hypergradient": hypergradient,
        "hessian": hessian,
        "alpha": alpha,
        "beta": beta if beta in (None, "auto") else _number("beta", beta),
        "momentum": momentum,
        "levels": levels,
        "num_inner_steps": inner_steps,
    }
    return {name: value for name, value in given.items() if value is not None}


def run_task(
    experiment: Experiment,
    out: Annotated[Path | None, typer.Option(help="folder of the run (runs/...)")] = None,
) -> None:
    title = f"{experiment.task} · {experiment.algorithm}"
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = out or Path("runs") / f"{experiment.task}-{experiment.algorithm}-{stamp}"
    console.print(f"{title}: making data and clients", highlight=False)
    with _progress(title, experiment.rounds) as show:
        result = guarded(lambda: run(experiment, folder, show), folder, _how_to_resume(folder))
    _print_result(result, folder)


@app.command("resume")
def resume_run(
    folder: Annotated[Path, typer.Argument(help="folder of a run that was stopped")],
    rounds: Annotated[int | None, typer.Option(help="do more rounds than it was to do")] = None,
) -> None:
    """Go on with a run from its last checkpoint."""
    experiment = guarded(lambda: recorded_experiment(folder, rounds), folder)
    title = f"{experiment.task} · {experiment.algorithm}"
    console.print(f"{title}: making data and clients", highlight=False)
    with _progress(title, experiment.rounds) as show:
        result = guarded(
            lambda: resume(experiment, folder, show, _say), folder, _how_to_resume(folder)
        )
    _print_result(result, folder)


def _how_to_resume(folder: Path) -> str:
    return f"; to go on: rabo resume {folder}"


def _say(text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)


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


class _progress:  # noqa: N801 - used like a function
    """A bar with the newest metrics; one plain line per tenth where there is no terminal."""

    def __init__(self, title: str, rounds: int):
        self.rounds = rounds
        self.bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[metrics]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task(title, total=rounds, metrics="")

    def __enter__(self) -> Callable[[Round], None]:
        self.bar.__enter__()
        return self.show

    def __exit__(self, *details: Any) -> None:
        self.bar.__exit__(*details)

    def show(self, done: Round) -> None:
        text = "  ".join(f"{name} {value:.4g}" for name, value in list(done.metrics.items())[:3])
        self.bar.update(self.task, completed=done.round + 1, metrics=text)
        if not console.is_terminal and (done.round + 1) % max(1, self.rounds // 10) == 0:
            console.print(f"round {done.round + 1}/{self.rounds}  {text}", highlight=False)


def _print_result(result: Result, folder: Path) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in result.metrics.items():
        table.add_row(name.replace("_", " "), f"{value:.4g}")
    cost = result.cost
    for name, share in result.relative_cost.items():
        spent = f"{getattr(cost, name):,}  ({share:.1%} of the full model)"
        table.add_row(name.replace("multiply_adds", "multiply-adds").replace("_", " "), spent)
    table.add_row("peak memory of a client", f"{cost.peak_memory_bytes:,} bytes")
    table.add_row("seconds on clients", f"{cost.seconds:.1f}")
    for level in ("x", "y"):
        covered = f"C* = {result.coverage[f'{level}_min']}"
        trained = f"{result.coverage[f'{level}_trained']:.1%} of entries trained"
        table.add_row(f"coverage of {level}", f"{covered}, {trained}")
    absent = {client for done in result.history for client in done.absent}
    if absent:
        why = next(why for done in result.history for why in done.absent.values())
        table.add_row("sat out", f"clients {sorted(absent)} ({why})")
    faults = [fault for done in result.history for fault in done.faults]
    if faults:
        who, last = sorted({fault.client for fault in faults}), faults[-1]
        why = f"the last in round {last.round} at {last.phase}: {last.why}"
        table.add_row("answers not used", f"{len(faults)} of clients {who} ({why})")
    skipped = [done for done in result.history if done.skipped]
    if skipped:
        why = f"the last is {skipped[-1].round}: {skipped[-1].skipped}"
        table.add_row("rounds given up", f"{len(skipped)} ({why})")
    console.print(table)
    console.print(f"run folder               {folder}", highlight=False, soft_wrap=True)


def _command_for(name: str, kind: type[Task], action: Callable[..., None]) -> Callable[..., None]:
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
        annotation = Annotated[plain, typer.Option(help=text)]
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


for _name, _kind in TASKS.items():
    run_app.command(_name)(_command_for(_name, _kind, run_task))
    compare_app.command(_name)(_command_for(_name, _kind, compare_task))


@app.command()
def demo(
    rounds: Annotated[int, typer.Option(help="rounds of each run")] = 30,
    out: Annotated[Path | None, typer.Option(help="folder of the runs (runs/demo-...)")] = None,
) -> None:
    """Learn to learn drawn characters: RABO on unequal clients against the full model."""
    folder = out or Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    table = Table("few-shot, 5-way 1-shot", "accuracy", "multiply-adds", "bytes", "C*_x, trained")
    for name, capacities in {"rabo": "1,1/2,1/4,1/8,1/16", "full model": "1"}.items():
        experiment = Experiment(
            task="few-shot",
            task_options={"backbone": "conv4", "channels": "32", "queries": 5, "test_tasks": 200},
            clients=5,
            capacities=capacities,
            rounds=rounds,
            evaluate_every=max(1, rounds // 3),
        )
        where = folder / name.replace(" ", "-")
        console.print(f"{name}: {rounds} rounds of 5 clients, capacities {capacities}")
        with _progress(name, rounds) as show:
            result = guarded(lambda e=experiment, w=where, s=show: run(e, w, s), where)
        table.add_row(name, *_demo_row(result))
    console.print(table)
    console.print(f"pictures of tasks: {folder}/*/tasks.png", highlight=False, soft_wrap=True)
    console.print(f"folders of the runs: {folder}", highlight=False, soft_wrap=True)


def _demo_row(result: Result) -> list[str]:
    metrics, share = result.metrics, result.relative_cost
    traffic = (result.cost.bytes_up + result.cost.bytes_down) / 1e6
    return [
        f"{metrics['accuracy']:.1%} ± {metrics['interval']:.1%}",
        f"{result.cost.multiply_adds / 1e9:,.0f} G ({share['multiply_adds']:.0%})",
        f"{traffic:,.0f} MB ({share['bytes_up']:.0%})",
        f"{result.coverage['x_min']}, {result.coverage['x_trained']:.0%}",
    ]


@app.command()
def theory(
    out: Annotated[Path, typer.Option(help="where the figures and numbers go")] = Path("theory"),
    quick: Annotated[bool, typer.Option("--quick", help="fewer rounds and seeds")] = False,
    seed: Annotated[int, typer.Option(help="seed of all draws")] = 0,
) -> None:
    """Measure what the paper's theory says, and draw it."""
    guarded(lambda: run_theory(out, quick=quick, seed=seed, report=console.print), out)
    console.print(f"figures and numbers: {out}")


def _keep_freed_memory() -> None:
    """Let glibc reuse large freed blocks instead of returning them: half the time on a CPU."""
    with contextlib.suppress(OSError, AttributeError):  # no glibc: nothing to tell
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            mallopt(option, 2**30)


_keep_freed_memory()

if __name__ == "__main__":
    app()
