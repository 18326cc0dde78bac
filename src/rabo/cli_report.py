"""`rabo report`: a page about runs."""

from pathlib import Path
from typing import Annotated

import typer

from rabo.report import write_report
from rabo.terminal import console, guarded


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="folders of runs, of a comparison, or of the demo")
    ],
    out: Annotated[Path, typer.Option(help="where the page goes")] = Path("report.html"),
) -> None:
    """Write one page about runs that any browser shows, without a network."""
    found = guarded(lambda: write_report(runs, out), out)
    told = f"{len(found)} run{'s' if len(found) > 1 else ''}: {out}"
    console.print(told, markup=False, highlight=False, soft_wrap=True)
    lost = sum(bool(run.missing) for run in found)
    if lost:
        console.print(f"{lost} of them lack files; the page says which", highlight=False)
