"""What is written to TensorBoard and MLflow, read back."""

import json
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from rabo.cli import app
from rabo.federation.rounds import Round
from rabo.runs.writers import Start, following, numbers_of

QUADRATIC = ("quadratic", "--clients", 2, "--rounds", 4, "--capacities", "1,1/2")


def call(*arguments):
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    assert done.exit_code == 0, done.output
    return done


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that was written to both, and went on to more rounds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        out = tmp_path_factory.mktemp("runs") / "run"
        call("run", *QUADRATIC, "--out", out, "--tensorboard", "--mlflow")
        call("resume", out, "--rounds", 6, "--tensorboard", "--mlflow")
        yield out


def recorded(out: Path) -> list[dict[str, float]]:
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [numbers_of(Round.from_dict(json.loads(line))) for line in lines]


def test_tensorboard_has_every_number_of_every_round_once(run):
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    rounds = recorded(run)
    assert len(rounds) == 6
    assert set(events.Tags()["scalars"]) == {name for numbers in rounds for name in numbers}
    for name in events.Tags()["scalars"]:
        found = {event.step: event.value for event in events.Scalars(name)}
        wanted = {i: numbers[name] for i, numbers in enumerate(rounds, 1) if name in numbers}
        assert found == pytest.approx(wanted, rel=1e-6), name  # it keeps float32


def test_mlflow_has_every_number_of_every_round_in_one_run(run):
    import mlflow

    note = json.loads((run / "mlflow.json").read_text())
    assert note["address"] == (run.parent / "mlruns").resolve().as_uri()
    client = mlflow.MlflowClient(note["address"])
    experiment = client.get_experiment_by_name("rabo-quadratic")
    [found] = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["capacities"] == "1,1/2"
    assert found.data.params["clients"] == "2"
    rounds = recorded(run)
    assert set(found.data.metrics) == {name for numbers in rounds for name in numbers}
    for name in found.data.metrics:
        history = client.get_metric_history(found.info.run_id, name)
        wanted = [(i, numbers[name]) for i, numbers in enumerate(rounds, 1) if name in numbers]
        assert sorted((m.step, m.value) for m in history) == wanted, name


def test_the_runs_of_a_comparison_are_followed_as_single_ones_are(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    options = ["--algorithms", "rabo,fedavg", "--seeds", 1, "--quiet", "--tensorboard", "--mlflow"]
    text = call("compare", *QUADRATIC, *options, "--out", tmp_path / "two").output
    assert "round" not in text.partition("to reach")[0]
    assert str(tmp_path / "two") in text.replace("\n", "")
    names = [f"two/{name}/seed-0" for name in ("fedavg", "rabo")]
    assert all(any((tmp_path / name / "tensorboard").iterdir()) for name in names)
    client = mlflow.MlflowClient((tmp_path / "mlruns").resolve().as_uri())
    experiment = client.get_experiment_by_name("rabo-quadratic")
    found = client.search_runs([experiment.experiment_id])
    assert sorted(run.info.run_name for run in found) == names


@pytest.mark.parametrize("package", ["tensorboard", "mlflow"])
def test_a_package_that_is_missing_is_named_before_anything_is_made(tmp_path, monkeypatch, package):
    for module in (package, f"torch.utils.{package}"):
        monkeypatch.setitem(sys.modules, module, None)
    arguments = ["run", *QUADRATIC, "--out", tmp_path / "run", f"--{package}"]
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    assert done.exit_code == 1
    assert f"pip install 'rabo[{package}]'" in " ".join(done.output.split())
    assert not (tmp_path / "run").exists()


class Notes:
    """Writes down what it hears."""

    def __init__(self, fails_at=None):
        self.heard, self.fails_at = [], fails_at

    def begin(self, start):
        self._note("begin")

    def add(self, done):
        self._note(done)

    def end(self, status):
        self.heard.append(status)

    def _note(self, what):
        if what == self.fails_at:
            raise RuntimeError(f"no {what}")
        self.heard.append(what)


START = Start(Path(), {}, "", False, 3, ())


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt, "interrupted"), (ValueError, "failed")]
)
def test_every_writer_hears_how_a_run_ended(error, status):
    writers = [Notes(), Notes()]

    def follow():
        with following(writers, START) as tell:
            tell("a round")
            raise error

    with pytest.raises(error):
        follow()
    assert [writer.heard for writer in writers] == [["begin", "a round", status]] * 2
    with following(writers[:1], START):
        pass
    assert writers[0].heard[-1] == "finished"


def test_a_writer_that_fails_does_not_keep_others_open():
    first, second = Notes(), Notes(fails_at="begin")
    with pytest.raises(RuntimeError, match="no begin"), following([first, second], START):
        pass
    assert first.heard == ["begin", "failed"]
    assert second.heard == []
