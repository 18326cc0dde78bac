"""`rabo report`: a page about runs."""

from os.path import commonpath
from pathlib import Path
from typing import Annotated

import typer

from rabo.runs.report import write_report
from rabo.runs.report.figures import count_of
from rabo.runs.terminal import console, guarded


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="folders of runs, of a comparison, or of the demo")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="where the page goes (report.html in the folder that holds the runs)"),
    ] = None,
) -> None:
    """Write one page about runs that any browser shows, without a network."""
    if out is not None and out.is_dir():
        raise typer.BadParameter(f"--out must be a page such as {out}/report.html, got a folder")
    page = out or _beside(runs)
    found = guarded(lambda: write_report(runs, page), page)
    told = count_of(len(found), "run")
    console.print(
        f"written: {page.resolve()} ({told})", markup=False, highlight=False, soft_wrap=True
    )
    lost = sum(bool(run.missing) for run in found)
    if lost:
        console.print(
            f"files are missing in {lost} of {told}; the page says which", highlight=False
        )


def _beside(runs: list[Path]) -> Path:
    """Return a page in the folder that holds all runs, or here where they share none."""
    try:
        return Path(commonpath([run.resolve() for run in runs])) / "report.html"
    except ValueError:  # on two drives
        return Path("report.html")
