"""`python -m experiments NAME`: run an experiment by name."""

import importlib
import signal
import sys
from collections.abc import Sequence
from typing import Any

from experiments import reproduce
from experiments.grids import GRIDS
from rabo.errors import lookup

COMMANDS = {  # name -> module with a function `main(words)`
    "tables": "experiments.pages",
    "theory": "experiments.theory",
    "unlike-clients": "experiments.unlike_clients",
    "which-method": "experiments.which_method",
}


def main(words: Sequence[str]) -> int:
    """Call the command with the first word as its name."""
    if not words or words[0] in ("-h", "--help"):
        print(f"{__doc__}\n\nTools: {', '.join(COMMANDS)}\nGrids of runs:")
        for grid in GRIDS.values():
            print(f"  {grid.name:26}{grid.title}")
        return 0
    signal.signal(signal.SIGTERM, _interrupt)  # handled like Ctrl-C
    try:
        name = words[0]
        lookup("experiment", name, {**COMMANDS, **GRIDS})
        if name in GRIDS:
            return reproduce.main(name, words[1:])
        return importlib.import_module(COMMANDS[name]).main(words[1:])
    except KeyboardInterrupt:
        print("interrupted: the same command goes on")
        return 130
    except (ValueError, RuntimeError, ImportError, ArithmeticError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
