"""The command line: one command per file, which parses, calls and prints."""

import contextlib
import ctypes
from importlib.util import find_spec
from typing import Annotated

import typer

from rabo.cli import compare, run
from rabo.cli.algorithms import list_algorithms
from rabo.cli.check import check
from rabo.cli.demo import demo
from rabo.cli.follow import say
from rabo.cli.report import report
from rabo.cli.resume import resume_run
from rabo.runs.experiment import versions
from rabo.runs.terminal import errors

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
app = typer.Typer(
    help="Federated bilevel optimisation on submodels that fit each client.",
    epilog="Example: rabo demo --rounds 10",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
app.add_typer(run.app, name="run")
app.add_typer(compare.app, name="compare")
app.command("algorithms", epilog="Example: rabo algorithms rabo")(list_algorithms)
app.command(epilog="Example: rabo report runs/first")(report)
app.command(epilog="Example: rabo check problem.py --clients 5")(check)
app.command("resume", epilog="Example: rabo resume runs/first --rounds 40")(resume_run)
app.command(epilog="Example: rabo demo --rounds 10 --out runs/demo")(demo)
if find_spec("flwr"):  # the extra rabo[flower]
    from rabo.cli.flower import app as flower_app

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
        say(", ".join(f"{name} {number}" for name, number in versions().items()))
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


def _keep_freed_memory() -> None:
    """Let glibc reuse large freed blocks instead of returning them: half the time on a CPU."""
    with contextlib.suppress(OSError, AttributeError):  # no glibc: nothing to tell
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            mallopt(option, 2**30)


_keep_freed_memory()

if __name__ == "__main__":
    app()
