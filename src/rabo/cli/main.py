"""The command line: parse, call, print."""

import contextlib
import ctypes
import importlib.util
import shlex
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rabo.cli.check import check
from rabo.cli.compare import compare_task, list_algorithms
from rabo.cli.options import command_for
from rabo.cli.report import report
from rabo.cli.reproduce import reproduce
from rabo.federation.rounds import Result
from rabo.runs.experiment import Experiment, recorded_experiment, resume, run, versions
from rabo.runs.live import view_of
from rabo.runs.summary import print_result
from rabo.runs.terminal import (
    Quiet,
    ToMLflow,
    ToTensorBoard,
    console,
    errors,
    guarded,
    writers_of,
)
from rabo.runs.writers import Writer
from rabo.tasks import TASKS
from rabo.theory import run_theory

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
app = typer.Typer(
    help="Federated bilevel optimisation on submodels that fit each client.",
    epilog="Example: rabo demo --rounds 10",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
run_app = typer.Typer(
    help="Run an algorithm on a task; the folder of the run has all that happened.",
    epilog="Example: rabo run digits --capacities 1,1/2,1/4 --rounds 20 --out runs/first",
    no_args_is_help=True,
)
app.add_typer(run_app, name="run")
compare_app = typer.Typer(
    help="Compare algorithms on a task: the same data and seeds, what they reach and cost.",
    epilog="Example: rabo compare digits --algorithms rabo,fedmbo,fedavg --seeds 3 --rounds 20",
    no_args_is_help=True,
)
app.add_typer(compare_app, name="compare")
app.command("algorithms", epilog="Example: rabo algorithms rabo")(list_algorithms)
app.command(epilog="Example: rabo report runs/first")(report)
app.command(epilog="Example: rabo check problem.py --clients 5")(check)
app.command(epilog="Example: rabo reproduce table-1 --seeds 1 --data-root ~/data")(reproduce)
if importlib.util.find_spec("flwr"):  # the extra rabo[flower]
    from rabo.flower.commands import app as flower_app

    app.add_typer(flower_app, name="flower")
else:

    @app.command(
        "flower",
        epilog="Example: pip install 'rabo[flower]'",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def flower_is_missing() -> None:
        """Federations on real machines (needs rabo[flower])."""
        errors.print("error: federations need flwr: pip install 'rabo[flower]'", markup=False)
        raise typer.Exit(2)


def _print_version(wished: bool) -> None:
    if wished:
        _say(", ".join(f"{name} {number}" for name, number in versions().items()))
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="print the version and stop", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None: ...


def run_task(
    experiment: Experiment,
    out: Annotated[Path | None, typer.Option(help="folder of the run (runs/...)")] = None,
    quiet: Quiet = False,
    tensorboard: ToTensorBoard = False,
    mlflow: ToMLflow = False,
) -> None:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = out or Path("runs") / f"{experiment.task}-{experiment.algorithm}-{stamp}"
    follow = partial(_follow, experiment, folder, quiet, tensorboard, mlflow)
    print_result(follow(lambda writers: run(experiment, folder, writers)), folder, console)


@app.command("resume", epilog="Example: rabo resume runs/first --rounds 40")
def resume_run(
    folder: Annotated[Path, typer.Argument(help="folder of a run that was stopped")],
    rounds: Annotated[int | None, typer.Option(help="do more rounds than it was to do")] = None,
    device: Annotated[str | None, typer.Option(help="go on on another: auto, cpu or cuda")] = None,
    quiet: Quiet = False,
    tensorboard: ToTensorBoard = False,
    mlflow: ToMLflow = False,
) -> None:
    """Go on with a run from its last checkpoint."""
    experiment = guarded(lambda: recorded_experiment(folder, rounds, device), folder)
    follow = partial(_follow, experiment, folder, quiet, tensorboard, mlflow)
    say = partial(_say, to=errors) if quiet else _say  # what is unusual is said in any case
    print_result(follow(lambda writers: resume(experiment, folder, writers, say)), folder, console)


def _follow(
    experiment: Experiment,
    folder: Path,
    quiet: bool,
    tensorboard: bool,
    mlflow: bool,
    train: Callable[[Sequence[Writer]], Result],
) -> Result:
    """Train and show it; what follows the run is opened before anything is made."""
    flags = {"quiet": quiet, "tensorboard": tensorboard, "mlflow": mlflow}
    given = "".join(f" --{name}" for name, wished in flags.items() if wished)

    def work() -> Result:
        writers = writers_of(folder, tensorboard, mlflow)
        if not quiet:
            what = f"{experiment.task} · {experiment.algorithm}"
            _say(f"{what}: making data and clients, for {folder}")
        return train([*view_of(console, quiet), *writers])

    return guarded(work, folder, f"; to go on: rabo resume {shlex.quote(str(folder))}{given}")


def _say(text: str, to: Console = console) -> None:
    to.print(text, markup=False, highlight=False, soft_wrap=True)


for _name, _kind in TASKS.items():
    _example = f"Example: rabo run {_name} {_kind.example}"
    run_app.command(_name, epilog=_example)(command_for(_name, _kind, run_task))
    _example = f"Example: rabo compare {_name} --algorithms rabo,fedavg --seeds 2 {_kind.example}"
    compare_app.command(_name, epilog=_example)(command_for(_name, _kind, compare_task))


@app.command(epilog="Example: rabo demo --rounds 10 --out runs/demo")
def demo(
    rounds: Annotated[int, typer.Option(help="rounds of each run")] = 30,
    out: Annotated[Path | None, typer.Option(help="folder of the runs (runs/demo-...)")] = None,
    quiet: Quiet = False,
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
        if not quiet:
            _say(f"{name}: {rounds} rounds of 5 clients, capacities {capacities}")
        follow = partial(_follow, experiment, where, quiet, tensorboard=False, mlflow=False)
        result = follow(train=lambda writers, e=experiment, w=where: run(e, w, writers))
        table.add_row(name, *_demo_row(result))
    console.print(table)
    _say(f"pictures of tasks: {folder}/*/tasks.png")
    _say(f"folders of the runs: {folder}")
    _say(f"as a page: rabo report {shlex.quote(str(folder))}")


def _demo_row(result: Result) -> list[str]:
    metrics, share = result.metrics, result.relative_cost
    traffic = (result.cost.bytes_up + result.cost.bytes_down) / 1e6
    return [
        f"{metrics['accuracy']:.1%} ± {metrics['interval']:.1%}",
        f"{result.cost.multiply_adds / 1e9:,.0f} G ({share['multiply_adds']:.0%})",
        f"{traffic:,.0f} MB ({share['bytes_up']:.0%})",
        f"{result.coverage['x_min']}, {result.coverage['x_trained']:.0%}",
    ]


@app.command(epilog="Example: rabo theory --quick --out theory")
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
