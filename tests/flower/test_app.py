"""The app: options of a run as text, and a problem of one's own from one file."""

import json
import shlex
import shutil
import tomllib
from dataclasses import fields
from io import StringIO
from pathlib import Path

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.config import validate_config
from flwr.serverapp import ServerApp
from flwr.supercore.task_identity import TaskIdentity
from grids import FakeGrid
from rich.console import Console
from typer.testing import CliRunner

import rabo
from rabo.cli import flower as commands
from rabo.execution import Request
from rabo.flower import events, launch
from rabo.flower.app import client_app, server_app
from rabo.flower.events import read_event
from rabo.flower.follow import Follower
from rabo.flower.launch import TEMPLATE, Children
from rabo.flower.messages import WORK, request_records, unpack
from rabo.flower.options import experiment_of, parse_options, run_config
from rabo.pruning.submodel import cut
from rabo.runs.experiment import Experiment
from rabo.tasks import TASKS

PROJECT = tomllib.loads((TEMPLATE / "pyproject.toml").read_text())
CONFIG = PROJECT["tool"]["flwr"]["app"]["config"]
OWN = {**CONFIG, "task": "own", "task-options": "file=problem.py", "device": "cpu"}


def test_flower_takes_the_template_as_it_is():
    valid, errors, warnings = validate_config(PROJECT, project_dir=TEMPLATE)
    assert (valid, errors, warnings) == (True, [], [])
    assert isinstance(server_app(TEMPLATE), ServerApp)
    assert isinstance(client_app(TEMPLATE), ClientApp)


@pytest.mark.parametrize("task", ["few-shot", "loss-tuning"])
def test_the_tasks_of_the_paper_need_no_download(task):
    options = {"few-shot": "channels=8 backbone=conv4", "loss-tuning": "width=4"}[task]
    setup, algorithm = experiment_of(
        {**CONFIG, "task": task, "task-options": options}, TEMPLATE
    ).build()
    assert len(setup.clients) == CONFIG["clients"]
    assert algorithm.seed == CONFIG["seed"]


def test_options_have_the_types_of_the_task():
    text = "channels=8 ways=3 test-tasks=4 download=true penalty=1e-3"
    found = parse_options(text, TASKS["few-shot"])
    assert found == {
        "channels": "8",
        "ways": 3,
        "test_tasks": 4,
        "download": True,
        "penalty": 1e-3,
    }
    assert parse_options("policy=rolling alpha=0.5") == {"policy": "rolling", "alpha": 0.5}
    with pytest.raises(ValueError, match="Did you mean 'ways'"):
        parse_options("way=3", TASKS["few-shot"])
    with pytest.raises(ValueError, match="name=value"):
        parse_options("ways")


@pytest.fixture(autouse=True)
def a_task_of_flower():
    """Without which no message can be made."""
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1


def context(partition, **node):
    return Context(1, 100 + partition, {"partition-id": partition, **node}, RecordDict(), OWN)


def roll_call(where, folder=TEMPLATE):
    message = Message(RecordDict({"request": ConfigRecord({"round": 0})}), 100, "query.width")
    [answer] = client_app(folder)(message, where).content.config_records.values()
    return dict(answer)


def test_a_node_answers_for_its_own_data_alone(tmp_path):
    text = (TEMPLATE / "problem.py").read_text()
    forbidden = "    assert partition == 1, 'the data of others'\n    generator ="
    (tmp_path / "problem.py").write_text(text.replace("    generator =", forbidden))
    assert roll_call(context(1, capacity=0.5), tmp_path) == {"client": 1, "width": 0.5}
    assert roll_call(context(0), tmp_path) == {"why": "AssertionError: the data of others"}


def test_a_node_must_say_whose_data_it_has():
    assert roll_call(context(2)) == {"client": 2, "width": 1.0}
    for where in (context(3), context(0, **{"num-partitions": 5})):
        assert "ValueError: this run has clients 0 to 2" in roll_call(where)["why"]
    nobody = context(0)
    nobody.node_config = {}
    assert "must say whose data it has" in roll_call(nobody)["why"]


def test_options_of_a_run_are_those_of_an_experiment_and_none_is_empty():
    plain = experiment_of(CONFIG, TEMPLATE)
    known = {field.name for field in fields(Experiment)} - {"runtime"}
    assert {name.replace("_", "-") for name in known} <= CONFIG.keys()
    assert (plain.capacities, plain.evaluate_every, plain.max_norm, plain.clip) == (None,) * 4
    assert (plain.on_fault, plain.participation, plain.noise_multiplier) == ("drop", 1.0, 0.0)
    config = {**OWN, "clip": 2.0, "max-norm": 9.0, "min-replies": 2, "algorithm-options": "beta=1"}
    asked = experiment_of(config, TEMPLATE)
    assert (asked.clip, asked.max_norm, asked.min_replies) == (2.0, 9.0, 2)
    assert asked.algorithm_options == {"beta": 1}
    assert asked.task_options == {"file": str(TEMPLATE / "problem.py")}


def answer_to(message, **config):
    where = context(0)
    where.run_config = {**OWN, "algorithm-options": "beta=0.1", **config}
    content = client_app(TEMPLATE)(message, where).content
    [arrays] = unpack("reply", content).values()
    return torch.cat([value.flatten() for value in arrays.values()])


def test_nobody_else_knows_the_noise_of_a_client_unless_the_run_is_to_be_repeated():
    setup, _ = experiment_of(OWN, TEMPLATE).build()
    problem = setup.clients[0].problem
    x, y = problem.start()
    whole = cut(problem.channels, {g: torch.arange(n) for g, n in problem.channels.units.items()})
    request = Request(0, 0, 0, whole, {"x": x, "y": y}, {"beta": 0.1})
    work = rabo.RABO(beta=0.1).update_inner
    message = Message(request_records(request, work), 100, WORK)
    exact = answer_to(message)
    clipped = answer_to(message, clip=0.5)
    assert exact.norm() > 0.5
    assert torch.allclose(clipped, 0.5 * exact / exact.norm())
    noisy = {"clip": 0.5, "noise-multiplier": 0.1}
    first, second = (answer_to(message, **noisy) - clipped for _ in range(2))
    assert not torch.equal(first, second)
    assert all(0 < noise.std() < 0.2 for noise in (first, second))
    again = [answer_to(message, **noisy, **{"repeatable-noise": True}) for _ in range(2)]
    assert torch.equal(*again)


def run_of_server(out, monkeypatch, *, problems=None, **config):
    """Run the server app on a fake grid, and return the lines of its log."""
    lines = []
    monkeypatch.setattr("rabo.flower.app.end_with", lambda parent: None)
    monkeypatch.setattr(events.log, "info", lambda text, *of: lines.append(f"{text % of}\n"))
    where = context(0)
    where.run_config = {**OWN, "clients": 2, "rounds": 3, "out": str(out), **config}
    setup, algorithm = experiment_of(where.run_config, TEMPLATE).build()
    grid = FakeGrid({i: client.problem for i, client in enumerate(setup.clients)}, algorithm)
    server_app(TEMPLATE)(grid, where)
    return lines


def shown(lines, log, quiet=False):
    """Return the follower of a run and what the terminal shows."""
    text = StringIO()
    console = Console(file=text, force_terminal=False, width=200)
    follower = Follower(console, console, quiet)
    follower.follow(lines, log)
    return follower, text.getvalue()


def test_the_terminal_shows_nodes_rounds_and_the_result_and_the_log_has_all(tmp_path, monkeypatch):
    out, log = tmp_path / "run", tmp_path / "logs" / "run.log"
    lines = ["INFO : of Flower\n", *run_of_server(out, monkeypatch)]
    follower, text = shown(lines, log)
    assert follower.is_finished
    assert follower.folder == str(out)
    assert "2 of 2 nodes" in text
    assert "round 3/3" in text
    assert "of Flower" not in text
    cost = json.loads((out / "summary.json").read_text())["cost"]
    assert f"{cost['bytes_up']:,}" in text
    assert f"rabo report {out}" in text
    assert len(text.splitlines()) < 30
    assert log.read_text() == "".join(lines)
    _, quiet = shown(lines, log, quiet=True)
    assert "round 3/3" not in quiet
    assert f"{cost['bytes_up']:,}" in quiet


def test_the_terminal_names_clients_that_sit_out_or_fail_once(tmp_path, monkeypatch):
    lines = run_of_server(tmp_path / "run", monkeypatch, clients=3, **{"min-clients": 2})
    kinds = [event["event"] for event in map(read_event, lines) if event]
    assert kinds.count("round") == 3
    rounds = [line for line in lines if '"event":"round"' in line]
    changed = [line.replace('"absent":{}', '"absent":{"1":"its node is gone"}') for line in rounds]
    _, text = shown([line for line in lines if line not in rounds][:2] + changed, tmp_path / "log")
    assert text.count("its node is gone") == 1


def test_the_error_of_a_run_is_told(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(events.log, "info", lambda text, *of: lines.append(f"{text % of}\n"))
    with pytest.raises(ValueError, match="too small"), events.failures_told():
        raise ValueError("alpha is too small")
    follower, _ = shown(lines, tmp_path / "log")
    assert (follower.is_finished, follower.error) == (False, "alpha is too small")


def test_options_of_the_command_line_change_those_of_the_app(tmp_path):
    launch.new_app(tmp_path)
    own = run_config(tmp_path, "few-shot", {"rounds": 4, "min_replies": 2}, {"ways": 3}, {})
    asked = experiment_of({**CONFIG, **own}, tmp_path / "app")
    assert (asked.rounds, asked.min_replies, asked.clients) == (4, 2, CONFIG["clients"])
    assert (asked.task_options["ways"], asked.task_options["channels"]) == (3, "32")
    falls = {"alpha": {"name": "cosine", "start": 0.3}}
    other = run_config(tmp_path, "own", {}, {}, falls)
    asked = experiment_of({**CONFIG, **other}, tmp_path / "app")
    assert asked.task_options == {"file": str(tmp_path / "app" / "problem.py")}
    assert asked.algorithm_options == falls
    with pytest.raises(ValueError, match="Did you mean 'num_inner_steps'"):
        run_config(tmp_path, "digits", {}, {}, {"num_iner_steps": 3})


def test_nodes_say_whom_they_join(tmp_path, monkeypatch):
    monkeypatch.setattr(Children, "start", lambda *_: None)
    words = ["nodes", str(tmp_path), "--clients", "2", "--port", "7"]
    done = CliRunner().invoke(commands.app, [*words, "--insecure"])
    assert "clients 0 to 1: joining 127.0.0.1:7 (PLAIN)" in done.output
    done = CliRunner().invoke(commands.app, words)
    assert done.exit_code == 1
    assert "ca.pem is missing: copy it from the server" in done.output


@pytest.fixture
def trial(tmp_path, monkeypatch):
    """A folder with an app and a connection, in which no process is started."""
    monkeypatch.setattr(commands, "_serve", lambda *_: None)
    monkeypatch.setattr(commands, "_join", lambda *_: None)
    launch.new_app(tmp_path)
    launch.connect(tmp_path, "127.0.0.1:7", plain=True)
    return tmp_path


@pytest.mark.parametrize("command", ["run", "up"])
def test_ctrl_c_says_what_becomes_of_the_run(trial, monkeypatch, command):
    begun = run_of_server(trial / "a run", monkeypatch)

    def stream(*_):
        yield from begun[:-2]
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "stream", stream)
    given = [command, str(trial), "own", "--rounds", "8", "--alpha", "0.3"]
    done = CliRunner().invoke(commands.app, given)
    assert done.exit_code == 130
    if command == "run":
        assert "goes on at the server" in done.output
    else:
        again = shlex.split(done.output.splitlines()[-1])
        out = str(trial / "a run")
        assert again == ["rabo", "flower", *given, "--out", out, "--resume"]


def test_a_run_that_fails_names_the_reason_and_the_log(trial, monkeypatch):
    event = json.dumps({"event": "error", "text": "two nodes are missing"})
    monkeypatch.setattr(launch, "stream", lambda *_: (line for line in [f"{events.MARK}{event}\n"]))
    done = CliRunner().invoke(commands.app, ["up", str(trial)])
    assert done.exit_code == 1
    assert "two nodes are missing" in done.output
    assert str(trial / "logs" / "run.log") in done.output.replace("\n", "")


def test_options_of_a_federation_are_those_of_a_run(trial, monkeypatch):
    seen = []

    def stream(command, env):
        seen.append(tomllib.loads(Path(command[-1]).read_text()))
        yield ""

    monkeypatch.setattr(launch, "stream", stream)
    words = ["digits", "--width", "16", "--alpha", "0.3", "--option", "num_inner_steps=2"]
    CliRunner().invoke(commands.app, ["run", str(trial), *words, "--deadline", "5"])
    [config] = seen
    asked = experiment_of({**CONFIG, **config}, trial / "app")
    assert (asked.task, asked.task_options) == ("digits", {"width": 16})
    assert asked.algorithm_options == {"alpha": 0.3, "num_inner_steps": 2}
    assert config["deadline"] == 5.0
    for wrong, right in {"--alhpa": "--alpha", "--roundss": "--rounds"}.items():
        done = CliRunner().invoke(commands.app, ["run", str(trial), "digits", wrong, "1"])
        assert done.exit_code == 2
        assert right in done.output.replace(wrong, "")
    assert len(seen) == 1


def test_a_folder_without_an_app_is_not_written_to(tmp_path):
    for command in ("run", "up"):
        done = CliRunner().invoke(commands.app, [command, str(tmp_path / "typo")])
        assert done.exit_code == 1
        assert "has no app: run `rabo flower new" in done.output
        assert list(tmp_path.iterdir()) == []
    launch.new_app(tmp_path)
    done = CliRunner().invoke(commands.app, ["run", str(tmp_path)])
    assert done.exit_code == 1
    assert "start it with `rabo flower server" in done.output


def test_a_message_that_no_algorithm_sends_is_refused():
    message = Message(RecordDict(), 100, "train.exec")
    with pytest.raises(ValueError, match="No train function registered"):
        client_app(TEMPLATE)(message, context(0))


def test_a_problem_of_ones_own_runs_in_process_and_the_server_needs_no_data(tmp_path):
    file = tmp_path / "problem.py"
    shutil.copy(TEMPLATE / "problem.py", file)
    with file.open("a") as end:
        end.write("\n\ndef evaluate(x, y):\n    return {'size': y['w'].norm()}\n")
    experiment = Experiment(
        task="own",
        task_options={"file": str(file)},
        clients=2,
        capacities="1,1/2",
        rounds=3,
    )
    federation, _ = experiment.federation()
    done = list(federation.run(3))[-1]
    assert done.present == {0: 1.0, 1: 0.5}
    assert done.metrics["size"] == pytest.approx(float(federation.state.y["w"].norm()))
    file.write_text(
        file.read_text().replace("    generator =", "    raise OSError\n    generator =")
    )
    far, _ = experiment.federation(runtime=federation.ledger)
    assert far.state.x.keys() == federation.state.x.keys()


def test_an_own_problem_that_is_not_there_or_is_none_is_refused(tmp_path):
    (tmp_path / "empty.py").write_text("")
    for name, why in (("missing.py", "not there"), ("empty.py", "must have problem")):
        with pytest.raises(ValueError, match=why):
            TASKS["own"](file=str(tmp_path / name)).build([1.0], 1, 0, "cpu")
