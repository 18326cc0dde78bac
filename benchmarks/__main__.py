"""`python -m benchmarks` lists the benchmarks; `python -m benchmarks NAME` runs one."""

import inspect
import sys
from collections.abc import Sequence
from importlib import import_module

from benchmarks.catalogue import MEASURED, SCRIPTS, Benchmark


def main(words: Sequence[str]) -> int:
    """Run what the command line asks for; return the exit status.

    Only the benchmark that is asked for is imported, so that it also runs with older versions of
    rabo that lack what others need.
    """
    if not words:
        print(listing())
        return 0
    try:
        if words[0] in SCRIPTS:
            return run_script(*words)
        from benchmarks.parts.measured import run

        return run(words)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def listing() -> str:
    """Return one line for each benchmark."""
    return "\n".join(
        [
            "Minutes are of one core or of one H200.",
            "Options: python -m benchmarks all --help",
            *(line(*each) for each in MEASURED.items()),
            "Arguments: python -m benchmarks NAME --help",
            *(line(*each) for each in SCRIPTS.items()),
        ]
    )


def line(name: str, benchmark: Benchmark) -> str:
    minutes = "–" if benchmark.minutes is None else f"{benchmark.minutes:g} min"
    return f"  {name:<16}{minutes:>8}  {benchmark.question}"


def run_script(name: str, *arguments: str) -> int:
    """Call `main` of a script, or print its usage where the arguments do not fit."""
    module = import_module(f"benchmarks.{name}")
    fits = "--help" not in arguments
    try:
        inspect.signature(module.main).bind(*arguments)
    except TypeError:
        fits = False
    if not fits:
        print(module.__doc__)
        return 0 if "--help" in arguments else 2
    module.main(*arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
