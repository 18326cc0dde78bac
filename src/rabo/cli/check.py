"""`rabo check`: the findings about a problem file, and an exit status for scripts."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.markup import escape

from rabo.checking import check as check_problem
from rabo.runs.terminal import console, errors
from rabo.tasks.own import clients_in

T = TypeVar("T")


def check(
    file: Annotated[
        Path,
        typer.Argument(help="Python file with problem(partition, num_partitions), or clients"),
    ],
    clients: Annotated[int, typer.Option(min=1, help="number of clients to check")] = 5,
    seed: Annotated[int, typer.Option(help="seed of batches and random directions")] = 0,
    max_seconds: Annotated[
        float, typer.Option(min=1.0, help="skip the checks that remain after this time")
    ] = 120.0,
) -> None:
    """Check the losses, curvature and hypergradients of a problem before you train it.

    The exit status is 1 if a check fails. Warnings leave it at 0.
    """
    given = _or_exit(lambda: clients_in(file, clients), 2)
    with contextlib.ExitStack() as stack:
        show: Callable[[str], None] | None = None
        if console.is_terminal:
            status = stack.enter_context(console.status("checking"))
            show = lambda name: status.update(f"checking: {name}")  # noqa: E731
        found = _or_exit(
            lambda: check_problem(
                given, seed=seed, max_clients=clients, max_seconds=max_seconds, on_check=show
            ),
            1,
        )
    console.print(found, highlight=False)
    if not found.passed:
        raise typer.Exit(1)


def _or_exit(work: Callable[[], T], code: int) -> T:
    """Turn errors that a user can correct into one line and an exit status."""
    try:
        return work()
    except (ValueError, ArithmeticError, ImportError) as error:
        errors.print(f"[red]error[/]: {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(code) from None
