"""`python -m experiments NAME`: run an experiment by name."""

import importlib
import signal
import sys
from collections.abc import Sequence
from typing import Any

from rabo.errors import ClientError, lookup

COMMANDS = {  # name -> module with a function `main(words)`
    "theory": "experiments.theory",
    "unlike-clients": "experiments.unlike_clients",
    "which-method": "experiments.which_method",
}


def main(words: Sequence[str]) -> int:
    """Call the command with the first word as its name."""
    if not words or words[0] in ("-h", "--help"):
        print(f"{__doc__}\n\nNames: {', '.join(COMMANDS)}\n")
        return 0
    signal.signal(signal.SIGTERM, _interrupt)  # handled like Ctrl-C
    try:
        module = importlib.import_module(lookup("experiment", words[0], COMMANDS))
        return module.main(words[1:])
    except KeyboardInterrupt:
        print("interrupted: the same command goes on")
        return 130
    except (ValueError, ImportError, ArithmeticError, OSError, ClientError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
