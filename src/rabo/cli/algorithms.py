"""`rabo algorithms`: the algorithms, and the options of one."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from rabo.algorithms import ALGORITHMS, find_algorithm
from rabo.federation.solve import NAMED, make_algorithm
from rabo.runs.terminal import console

NOTES = """\
Full model: clients train all of it, whatever their capacity; with --policy, submodels that fit.
Exchanges: T inner steps, N terms of a series, N' of them at random, K products.
Vectors: q mean slope in y, p and v solutions of the linear system, x_h mean slope in x.
Few-shot: whether one y for all tasks is needed (--heads shared), or the algorithm is for few-shot
only."""

OPTIONS = """\
Give them by flags of `rabo run` and `rabo compare`, or as --option NAME=VALUE; what is
named and has options of its own as JSON ('{"name": "neumann", "num_terms": 5}').
A task may suggest other values; config.json of a run has those that it took."""


def exchanges_of_algorithms() -> list[dict[str, str]]:
    """Return what rounds exchange, and what algorithms need."""
    heads = {True: "--heads shared", False: "any"}
    return [
        {
            "name": name,
            "as published": kind.kind,
            "exchanges a round": kind.exchanges,
            "vectors": kind.vectors,
            "second order": "yes" if kind.second_order else "no",
            "few-shot": "only" if kind.is_episodic else heads[kind.needs_one_y],
        }
        for name, kind in ALGORITHMS.items()
    ]


def papers_of_algorithms() -> list[dict[str, str]]:
    """Return where algorithms come from."""
    return [
        {"name": name, "class": kind.__name__, "paper": kind.paper}
        for name, kind in ALGORITHMS.items()
    ]


def options_of_algorithm(name: str) -> list[dict[str, str]]:
    """Return the options of an algorithm, with their defaults and what they may name."""
    plain = make_algorithm(name)
    return [
        {
            "option": each.name,
            "default": str(getattr(plain, each.name)),
            "or one of": ", ".join(NAMED.get(each.name, ())),
        }
        for each in fields(find_algorithm(name))
    ]


def list_algorithms(
    name: Annotated[
        str | None,
        typer.Argument(
            help="one of them: show its options",
            autocompletion=lambda incomplete: [n for n in ALGORITHMS if n.startswith(incomplete)],
        ),
    ] = None,
) -> None:
    """List all algorithms: what a round exchanges, and where they come from; or one's options."""
    if name is None:
        for rows in (exchanges_of_algorithms(), papers_of_algorithms()):
            _print_rows(rows)
        console.print(NOTES, highlight=False)
        return
    try:
        rows = options_of_algorithm(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    kind = find_algorithm(name)
    paragraphs = (inspect.getdoc(kind) or "").split("\n\n")
    about = "\n\n".join(" ".join(each.split()) for each in paragraphs)
    console.print(f"{name}: {about}\n\n{kind.paper}", highlight=False, markup=False)
    _print_rows(rows)
    console.print(OPTIONS, highlight=False)


def _print_rows(rows: Sequence[Mapping[str, str]]) -> None:
    table = Table(*rows[0], box=SIMPLE_HEAD)
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*row.values())
    console.print(table)
