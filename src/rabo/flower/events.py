"""Progress of a run, from the server app to the terminal, as lines of Flower's log."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rabo.federation.rounds import Result, Round
from rabo.runs.summary import rows_of
from rabo.runs.terminal import told_warnings
from rabo.runs.writers import Start

MARK = "rabo-event "  # before the JSON of an event
NUM_KEPT = 100  # rounds before a resume that the view shows
log = logging.getLogger("flwr")


def tell(kind: str, **values: Any) -> None:
    """Log an event as one line."""
    log.info("%s%s", MARK, json.dumps({"event": kind, **values}, separators=(",", ":")))


def read_event(line: str) -> dict[str, Any] | None:
    """Return the event of a line of the log, if it has one."""
    _, mark, text = line.partition(MARK)
    return json.loads(text) if mark else None


class Events:
    """Tells the terminal of every round."""

    def begin(self, start: Start) -> None:
        about = {name: start.config[name] for name in ("task", "algorithm")}
        known = {name: getattr(start, name) for name in ("headline", "falls", "rounds")}
        past = [done.as_dict() for done in start.history[-NUM_KEPT:]]
        every = start.evaluate_every
        tell(
            "begin",
            folder=str(start.folder),
            config=about,
            history=past,
            evaluate_every=every,
            **known,
        )

    def add(self, done: Round) -> None:
        tell("round", round=done.as_dict())

    def end(self, status: str) -> None:
        """The result follows, or an error."""


def tell_result(result: Result, folder: Path) -> None:
    """Log the last table of a run."""
    tell("result", rows=rows_of(result), folder=str(folder))


@contextmanager
def failures_told() -> Iterator[None]:
    """Log warnings about a run, and the error that ends it."""
    with told_warnings(lambda text: tell("warning", text=text)):
        try:
            yield
        except Exception as error:
            tell("error", text=f"{error}" or type(error).__name__)
            raise


def start_of(event: dict[str, Any]) -> Start:
    """Read what `Events.begin` told."""
    return Start(
        Path(event["folder"]),
        event["config"],
        event["headline"],
        event["falls"],
        event["rounds"],
        [Round.from_dict(done) for done in event["history"]],
        event["evaluate_every"],
    )
