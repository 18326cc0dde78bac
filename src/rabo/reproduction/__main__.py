"""`python -m rabo.reproduction NAME ...` is `rabo reproduce NAME ...` where typer is missing."""

import argparse
import signal
from typing import Any

from rabo.errors import ClientError
from rabo.reproduction.request import Request


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rabo.reproduction", description=__doc__)
    Request.declare(parser)
    signal.signal(signal.SIGTERM, _stop)  # as Ctrl-C: a run that is cut goes on from a checkpoint
    try:
        return Request(**vars(parser.parse_args())).perform()
    except KeyboardInterrupt:
        print("interrupted: give the same command again to go on")
        return 130
    except (ValueError, ImportError, ArithmeticError, OSError, ClientError) as error:
        parser.exit(1, f"error: {error}\n")


def _stop(*_: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    raise SystemExit(main())
