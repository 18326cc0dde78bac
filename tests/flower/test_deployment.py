"""Real processes, TLS and authentication: the bits of one process, and rounds that go on."""

import json
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from test_app import CONFIG
from trial import Simulation, Trial

from rabo.errors import ReplyError
from rabo.exchange.budgets import Absent
from rabo.exchange.work import failed
from rabo.execution import InProcess
from rabo.flower.credentials import make_keys
from rabo.flower.launch import TEMPLATE
from rabo.flower.membership import register
from rabo.flower.options import experiment_of
from rabo.runs.experiment import run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("processes"),  # one federation at a time
]
RUNS = {
    "rabo": {
        "task": "digits",
        "task_options": "width=16",
        "capacities": "1,1/2,1/4",
        "rounds": 3,
    },
    "rafbo": {
        "task": "own",
        "task_options": "file=problem.py",
        "algorithm": "rafbo",
        "capacities": "1,1/2,1/4",
        "rounds": 4,
        "clip": 1.0,
        "noise_multiplier": 0.01,
        "repeatable_noise": True,
    },
}


def in_process(folder: Path, **config):
    options = {**CONFIG, "device": "cpu"} | {k.replace("_", "-"): v for k, v in config.items()}
    return experiment_of(options, folder)


def lines(out: Path) -> list[dict]:
    """Return the rounds that a run has written."""
    metrics = out / "metrics.jsonl"
    text = metrics.read_text() if metrics.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def assert_same_tensors(a: Path, b: Path) -> None:
    for name in ("x.safetensors", "y.safetensors"):
        mine, theirs = load_file(a / name), load_file(b / name)
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert torch.equal(value, theirs[key]), (name, key)


def without_time(done):
    """All but seconds, and the memory of graphs that are built anew."""
    costs = {
        total: {name: done[total][name] for name in ("bytes_up", "bytes_down", "multiply_adds")}
        for total in ("cost", "total")
    }
    return {name: value for name, value in done.items() if name != "seconds"} | costs


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    with Trial(tmp_path_factory.mktemp("deployment") / "trial") as trial:
        yield trial
    assert all(process.poll() is not None for process in trial.children.processes)


@pytest.fixture(scope="module")
def simulation(tmp_path_factory):
    with Simulation(tmp_path_factory.mktemp("simulation") / "trial") as trial:
        yield trial
    assert all(process.poll() is not None for process in trial.children.processes)


@pytest.mark.parametrize("algorithm", RUNS)
@pytest.mark.parametrize("where", ["simulation", "deployment"])
def test_clients_in_one_process_and_in_many_agree_bit_for_bit(where, algorithm, request, tmp_path):
    trial, config = request.getfixturevalue(where), RUNS[algorithm]
    trial.begin(tmp_path / "far", **config)
    run(in_process(TEMPLATE, **config), tmp_path / "near")
    trial.finish(tmp_path / "far")
    assert_same_tensors(tmp_path / "near", tmp_path / "far")
    near, far = (list(map(without_time, lines(tmp_path / name))) for name in ("near", "far"))
    for done in near:
        done["metrics"].pop("outer_loss", None)  # it needs data that a server does not have
    assert near == far
    assert not any(done["faults"] or done["absent"] for done in far)


HOSTILE = """

from dataclasses import replace
from pathlib import Path
import os
import time

from rabo.flower import worker

_problem, _perform, _folder = problem, worker.perform, Path({folder!r})


def problem(partition, num_partitions):
    worker.perform = lambda *asked: answer(partition, *asked)
    return _problem(partition, num_partitions)


def answer(client, work, request, context, meter):
    reply, when = _perform(work, request, context, meter), (request.round, client, work.name)
    if when == (1, 1, "update_inner"):
        return replace(reply, arrays={{"y": {{"w": reply.arrays["y"]["w"] * float("nan")}}}})
    if when == (1, 2, "estimate_outer"):
        return replace(reply, arrays={{"x": {{"log_penalty": torch.zeros(9)}}}})
    if when in [(2, 1, "update_inner"), (2, 2, "update_inner")]:
        (_folder / f"client-{{client}}").write_text(str(os.getpid()))
        while not (_folder / "go-on").exists():
            time.sleep(0.1)
    return reply
"""


class Recorded(InProcess):
    """Clients that take part, sit out and fail when a record says so."""

    def __init__(self, problems, rounds):
        super().__init__(problems)
        self.rounds = rounds

    def widths(self, round, clients):
        done = self.rounds[round]
        absent = {int(client): Absent(why) for client, why in done["absent"].items()}
        return {int(client): width for client, width in done["present"].items()} | absent

    def map(self, work, requests):
        for request in requests:
            faults = {
                (f["client"], f["phase"]): f["why"] for f in self.rounds[request.round]["faults"]
            }
            if (request.client, work.name) in faults:
                why = ReplyError(faults[request.client, work.name])
                yield failed(request, work, why)
            else:
                yield from super().map(work, [request])


def test_a_run_survives_liars_the_slow_and_the_dead_and_its_own_death(deployment, tmp_path):
    trial, out = deployment, tmp_path / "out"
    *_, stranger = make_keys(trial.folder, 5)
    stranger.with_suffix(".pub").unlink()  # nobody registers it
    register(trial.folder, trial.address)
    trial.nodes.append(trial.join(4))
    file = trial.app / "problem.py"
    plain = file.read_text()
    file.write_text(plain + HOSTILE.format(folder=str(tmp_path)))
    config = {
        "task": "own",
        "task_options": "file=problem.py",
        "algorithm_options": "beta=0.01",
        "clients": 5,
        "min_clients": 3,
        "deadline": 15.0,
        "resume": True,
    }
    trial.begin(out, **config, rounds=1000)
    trial.wait_for(lambda: (tmp_path / "client-1").exists() and (tmp_path / "client-2").exists())
    trial.nodes[2].kill()
    trial.nodes[2].wait()
    orphan = int((tmp_path / "client-2").read_text())
    trial.wait_for(lambda: not psutil.pid_exists(orphan), 30)  # it ends with its node
    trial.wait_for(lambda: len(lines(out)) > 3)  # a round without them
    (tmp_path / "go-on").touch()
    trial.nodes.append(trial.join(3, "capacity=0.5"))  # late, and with less than others
    trial.wait_for(lambda: {"1", "3"} <= lines(out)[-1]["present"].keys())
    assert lines(out)[-1]["present"] == {"0": 1.0, "1": 1.0, "3": 0.5}
    trial.kill_server()
    num_done = len(lines(out))
    trial.serve()
    trial.begin(out, **config, rounds=num_done + 2)
    trial.finish(out)

    rounds = lines(out)
    assert len(rounds) == num_done + 2
    slow, who = "no answer within 15 s", [done["absent"] for done in rounds]
    norm = "its norm must be finite, got nan"
    shape = "torch.float32 of shape (8,)"
    faults = [tuple(fault.values()) for done in rounds for fault in done["faults"]]
    assert faults[0][:3] == (1, 1, "update_inner")
    assert faults[0][3].startswith(norm)
    assert faults[1][:3] == (1, 2, "estimate_outer")
    assert faults[1][3] == f"x.log_penalty must be {shape}, got torch.float32 of (9,)"
    assert faults[2:] == [(2, client, "update_inner", slow) for client in (1, 2)]
    assert {absent["4"] for absent in who} == {"no node has joined for it"}
    assert [*map(sorted, who[:4])] == [["3", "4"], ["3", "4"], ["3", "4"], ["1", "2", "3", "4"]]
    assert {absent["2"] for absent in who[3:]} <= {
        "no answer since round 3",
        "its node is gone",
        "no node has joined for it",  # as a server says that has just been started
    }
    assert rounds[2]["coverage"]["y"]["minimum"] == 1

    file.write_text(plain)
    config |= {"on_fault": "drop", "rounds": len(rounds)}
    experiment = in_process(trial.app, **config)
    problems = {i: c.problem for i, c in enumerate(experiment.federation()[0].clients)}
    run(experiment, tmp_path / "near", runtime=Recorded(problems, rounds))
    assert_same_tensors(tmp_path / "near", out)
    assert [d["faults"] for d in lines(tmp_path / "near")] == [d["faults"] for d in rounds]
