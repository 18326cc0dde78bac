"""The command line: parse, call, print."""

import contextlib
import ctypes
import importlib.util
import inspect
import signal
import threading
from collections.abc import Callable
from dataclasses import MISSING, fields
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from rabo.algorithms import ALGORITHMS
from rabo.errors import ClientError
from rabo.experiment import Experiment, run
from rabo.hypergradients import ESTIMATORS
from rabo.masks import POLICIES
from rabo.solve import Result, Round
from rabo.tasks import TASKS, Task
from rabo.theory import run_theory

console = Console()
errors = Console(stderr=True)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
app = typer.Typer(
    help="Federated bilevel optimisation on submodels that fit each client.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
run_app = typer.Typer(help="Run an algorithm on a task.", no_args_is_help=True)
app.add_typer(run_app, name="run")
if importlib.util.find_spec("flwr"):  # the extra rabo[flower]
    from rabo.flower.commands import app as flower_app

    app.add_typer(flower_app, name="flower")


def run_task(
    task: str,
    task_options: dict[str, Any],
    algorithm: Annotated[str, typer.Option(help=", ".join(ALGORITHMS))] = "rabo",
    clients: Annotated[int, typer.Option(help="number of clients")] = 10,
    rounds: Annotated[int, typer.Option(help="number of rounds Q")] = 100,
    capacities: Annotated[
        str | None,
        typer.Option(
            help="what clients have, dealt in turn: width fractions (1,1/2,1/4) or budgets "
            "(memory:64MB, multiply-adds:2G, traffic:1MB per round); by default 1, and 1/2 in "
            "loss-tuning"
        ),
    ] = None,
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
    inner_steps: Annotated[int | None, typer.Option(help="inner steps T of a round")] = None,
    participation: Annotated[float, typer.Option(help="fraction of clients per round")] = 1.0,
    seed: Annotated[int, typer.Option(help="seed of data, model and draws")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    runtime: Annotated[
        str,
        typer.Option(
            help="plain (one client after the other), recorded (work is recorded and replayed), "
            "or auto (recorded on a GPU)"
        ),
    ] = "auto",
    evaluate_every: Annotated[int | None, typer.Option(help="rounds between evaluations")] = None,
    out: Annotated[Path | None, typer.Option(help="folder of the run (runs/...)")] = None,
) -> None:
    given = {
        "policy": policy,
        "hypergradient": hypergradient,
        "hessian": hessian,
        "alpha": alpha,
        "beta": beta if beta in (None, "auto") else _number("beta", beta),
        "momentum": momentum,
        "num_inner_steps": inner_steps,
    }
    experiment = Experiment(
        task=task,
        task_options=task_options,
        algorithm=algorithm,
        algorithm_options={name: value for name, value in given.items() if value is not None},
        clients=clients,
        capacities=capacities,
        rounds=rounds,
        participation=participation,
        seed=seed,
        device=device,
        runtime=runtime,
        evaluate_every=evaluate_every,
    )
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = out or Path("runs") / f"{task}-{algorithm}-{stamp}"
    console.print(f"{task} · {algorithm}: making data and clients", highlight=False)
    with _progress(f"{task} · {algorithm}", rounds) as show:
        result = _guarded(lambda: run(experiment, folder, show), folder)
    _print_result(result, folder)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{name} must be a number or auto, got {text!r}") from None


def _guarded(work: Callable[[], Any], folder: Path) -> Any:
    """Turn what a user can mend into one line, and keep what was reached."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, stop)  # as Ctrl-C: what was reached is kept
    try:
        return work()
    except KeyboardInterrupt:
        errors.print(f"[yellow]interrupted[/]: the rounds so far are in {folder}", highlight=False)
        raise typer.Exit(130) from None
    except (ValueError, ImportError, ArithmeticError, OSError, ClientError) as error:
        errors.print(f"[red]error[/]: {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


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
        self.bar.update(self.task, advance=1, metrics=text)
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
    console.print(table)
    console.print(f"run folder               {folder}", highlight=False, soft_wrap=True)


def _command_for(name: str, kind: type[Task]) -> Callable[..., None]:
    """Make `rabo run NAME` with the fields of the task beside the common options."""
    hints = get_type_hints(kind, include_extras=True)
    own = []
    for option in fields(kind):  # type: ignore[arg-type]
        plain, text = get_args(hints[option.name])[:2]
        default = option.default if option.default is not MISSING else ...
        annotation = Annotated[plain, typer.Option(help=text)]
        own.append(
            inspect.Parameter(
                option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
        )
    common = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(run_task).parameters.values()
        if parameter.name not in ("task", "task_options")
    ]

    def command(**options: Any) -> None:
        task_options = {p.name: options.pop(p.name) for p in own}
        run_task(name, task_options, **options)

    command.__signature__ = inspect.Signature([*common, *own])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in [*common, *own]}
    command.__doc__ = kind.__doc__
    return command


for _name, _kind in TASKS.items():
    run_app.command(_name)(_command_for(_name, _kind))


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
            result = _guarded(lambda e=experiment, w=where, s=show: run(e, w, s), where)
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
    _guarded(lambda: run_theory(out, quick=quick, seed=seed, report=console.print), out)
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
