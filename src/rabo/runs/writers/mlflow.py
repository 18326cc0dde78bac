"""Rounds as MLflow reads them."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rabo.errors import needs
from rabo.federation.rounds import Round
from rabo.runs.writers.base import Start, numbers_of

STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class MLflow:
    """A run of the experiment rabo-TASK: on the server that MLFLOW_TRACKING_URI names, else in the
    folder mlruns beside the given one, which is that of a run or of a comparison.

    RUN/mlflow.json says which it is: a run that goes on is the same run there.
    """

    def __init__(self, folder: Path) -> None:
        self._beside = folder.resolve().parent
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        with needs("mlflow", "runs with --mlflow"):
            import mlflow
            import mlflow.entities
        self._mlflow = mlflow

    def begin(self, start: Start) -> None:
        self._address = _address(self._beside)
        note = start.folder / "mlflow.json"
        with self._reached():
            self._client = self._mlflow.MlflowClient(self._address)
            self._run = self._known_run(json.loads(note.read_text())) if note.exists() else ""
            if not (start.history and self._run):
                self._run = self._new_run(start)
        note.write_text(json.dumps({"address": self._address, "run": self._run}) + "\n")

    def add(self, done: Round) -> None:
        now = int(1000 * time.time())
        metrics = [
            self._mlflow.entities.Metric(name, value, now, done.round + 1)
            for name, value in numbers_of(done).items()
        ]
        with self._reached():
            self._client.log_batch(self._run, metrics=metrics)

    def end(self, status: str) -> None:
        with self._reached():
            self._client.set_terminated(self._run, STATUS[status])

    def _known_run(self, note: dict[str, str]) -> str:
        if note["address"] == self._address:
            with suppress(self._mlflow.MlflowException):  # it was removed there
                self._client.update_run(note["run"], status="RUNNING")
                return note["run"]
        return ""

    def _new_run(self, start: Start) -> str:
        name = f"rabo-{start.config['task']}"
        known = self._client.get_experiment_by_name(name)
        own = known.experiment_id if known else self._client.create_experiment(name)
        called = start.folder.resolve().relative_to(self._beside).as_posix()
        run = self._client.create_run(own, run_name=called).info.run_id
        parameters = [self._mlflow.entities.Param(k, _text(v)) for k, v in start.config.items()]
        self._client.log_batch(run, params=parameters)
        return run

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except self._mlflow.MlflowException as error:
            raise OSError(f"MLflow at {self._address} cannot be written: {error}") from error


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _address(folder: Path) -> str:
    given = os.environ.get("MLFLOW_TRACKING_URI")
    if given:
        return given
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # it would rather have a database
    return (folder / "mlruns").as_uri()
