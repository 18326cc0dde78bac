"""`rabo demo`: RABO on unequal clients against the full model."""

import shlex
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from rabo.cli.follow import Following, follow, say
from rabo.federation.rounds import Result
from rabo.runs.experiment import Experiment, run
from rabo.runs.terminal import Quiet, console


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
            say(f"{name}: {rounds} rounds of 5 clients, capacities {capacities}")
        train = partial(run, experiment, where)
        result = follow(experiment, where, Following(quiet=quiet), train)
        table.add_row(name, *_row(result))
    console.print(table)
    say(f"pictures of tasks: {folder}/*/tasks.png")
    say(f"folders of the runs: {folder}")
    say(f"as a page: rabo report {shlex.quote(str(folder))}")


def _row(result: Result) -> list[str]:
    metrics, share = result.metrics, result.relative_cost
    traffic = (result.cost.bytes_up + result.cost.bytes_down) / 1e6
    return [
        f"{metrics['accuracy']:.1%} ± {metrics['interval']:.1%}",
        f"{result.cost.multiply_adds / 1e9:,.0f} G ({share['multiply_adds']:.0%})",
        f"{traffic:,.0f} MB ({share['bytes_up']:.0%})",
        f"{result.coverage['x_min']}, {result.coverage['x_trained']:.0%}",
    ]
