"""A run on a federation, as `rabo run` shows it: from the events in Flower's log."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from rabo.federation.rounds import Round
from rabo.flower.events import read_event, start_of
from rabo.runs.live import view_of
from rabo.runs.summary import print_rows
from rabo.runs.writers import Writer


class Follower:
    """Shows the events of one run; all lines go to a log."""

    def __init__(self, console: Console, errors: Console, quiet: bool = False):
        self.console, self.errors, self.quiet = console, errors, quiet
        self.folder, self.error, self.is_finished = "", "", False
        self._views: list[Writer] = []
        self._absent: dict[int, str] = {}

    def follow(self, lines: Iterable[str], log: Path) -> None:
        """Show a run until its lines end; the view is closed however they end."""
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("w") as file:
                for line in lines:
                    file.write(line)
                    file.flush()
                    event = read_event(line)
                    if event is not None:
                        self._show(event)
        finally:
            self._close()

    def _show(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "say":
                self._say(event["text"])
            case "warning":
                self._warn(event["text"])
            case "begin":
                self._begin(event)
            case "round":
                self._add(Round.from_dict(event["round"]))
            case "error":
                self.error = event["text"]
            case "result":
                self._close()
                self.is_finished = True
                print_rows(event["rows"], Path(event["folder"]), self.console)

    def _begin(self, event: dict[str, Any]) -> None:
        start = start_of(event)
        self.folder = str(start.folder)
        self._say(f"{start.config['task']} · {start.config['algorithm']}, in {self.folder}")
        self._views = view_of(self.console, self.quiet)
        for view in self._views:
            view.begin(start)

    def _add(self, done: Round) -> None:
        for client, why in done.absent.items():
            if self._absent.get(client) != why:
                self._warn(f"client {client} sits out from round {done.round + 1} on: {why}")
        for client in self._absent.keys() & done.present.keys():
            self._say(f"client {client} takes part again from round {done.round + 1} on")
        self._absent = dict(done.absent)
        for round, client, phase, why in done.faults:
            self._warn(f"client {client} failed at {phase} in round {round + 1}: {why}")
        if done.skipped:
            self._warn(f"round {done.round + 1} was given up: {done.skipped}")
        for view in self._views:
            view.add(done)

    def _close(self) -> None:
        views, self._views = self._views, []
        for view in views:
            view.end("finished" if self.is_finished else "failed")

    def _say(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _warn(self, text: str) -> None:
        line = f"[yellow]warning[/]: {escape(text)}"
        self.errors.print(line, highlight=False, soft_wrap=True)
