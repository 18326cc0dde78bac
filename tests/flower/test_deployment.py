"""Real processes, TLS and authentication: the bits of one process, and rounds that go on."""

import json
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from trial import Simulation, Trial

from rabo.experiment import Experiment, run
from rabo.flower.credentials import make_keys
from rabo.runtimes import InProcess

CAPACITIES = "1,1/2,1/4"
TASKS = {
    "rabo": {"task": "digits", "task_options": "width=16"},
    "rafbo": {
        "task": "few-shot",
        "task_options": "backbone=conv4 channels=8 tasks=2 queries=3 test_tasks=4",
    },
}


def in_process(algorithm: str, rounds: int, out: Path) -> Path:
    from rabo.flower.sites import parse_options
    from rabo.tasks import TASKS as KINDS

    task = TASKS[algorithm]["task"]
    experiment = Experiment(
        task=task,
        task_options=parse_options(TASKS[algorithm]["task_options"], KINDS[task]),
        algorithm=algorithm,
        algorithm_options={"num_inner_steps": 3},
        clients=3,
        capacities=CAPACITIES,
        rounds=rounds,
        device="cpu",
    )
    run(experiment, out)
    return out


def assert_same(a: Path, b: Path) -> None:
    for name in ("x.safetensors", "y.safetensors"):
        mine, theirs = load_file(a / name), load_file(b / name)
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert torch.equal(value, theirs[key]), (name, key)
    # all but seconds, and the memory of graphs that are built anew
    assert [_line(x) for x in _lines(a)] == [_line(x) for x in _lines(b)]


def _lines(folder):
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


def _line(done):
    cost = {name: done["cost"][name] for name in ("bytes_up", "bytes_down", "multiply_adds")}
    return {**done, "cost": cost}


@pytest.fixture(params=[Trial, Simulation], ids=["deployment", "simulation"])
def trial(request, tmp_path):
    with request.param(tmp_path / "trial") as trial:
        yield trial
    assert all(process.poll() is not None for process in trial.children.processes)


def test_clients_in_one_process_and_in_many_agree_bit_for_bit(trial, tmp_path):
    stranger = None
    options = ["--federation-config", "num-supernodes=3 client-resources-num-cpus=1"]
    if trial.nodes:
        make_keys(trial.folder, 4)
        stranger, options = trial.join(3), []  # whom nobody registered
    for algorithm, task in TASKS.items():
        out = tmp_path / "sent" / algorithm
        summary = trial.run(
            out,
            *options,
            **task,
            algorithm=algorithm,
            algorithm_options="num_inner_steps=3",
            capacities=CAPACITIES,
            rounds=3,
        )
        assert summary["status"] == "finished"
        assert_same(in_process(algorithm, 3, tmp_path / "plain" / algorithm), out)
        assert not (out / "faults.jsonl").exists()
    if stranger is not None:
        assert stranger.wait(timeout=30) != 0  # it was refused, and ends


SLOW = """

_problem = problem


def problem(partition, num_partitions):
    own = _problem(partition, num_partitions)

    def slow(x, y, data):
        if partition > 0 and x["log_penalty"].any():  # in the first round they are zero
            Path({folder!r}, f"client-{{partition}}-works").write_text(str(os.getpid()))
            time.sleep(80)
        return train(x, y, data)

    slowed = dataclasses.replace(own.problem, inner=slow)
    return slowed.on(inner=own.data.inner, outer=own.data.outer)
"""


def _wait_until_ended(pids):
    """The processes of messages end with their nodes, though they sleep."""
    end = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.1)


class Alone(InProcess):
    """From round 1 on, client 0 alone answers."""

    def map(self, work, tasks):
        return super().map(work, ((c, t) for c, t in tasks if c == 0 or t.round == 0))


def test_a_run_goes_on_without_a_node_that_is_killed_and_one_that_is_slow(tmp_path):
    out = tmp_path / "out"
    with Trial(tmp_path / "trial") as trial:
        file = trial.app / "problem.py"
        plain = tmp_path / "plain.py"
        plain.write_text(file.read_text())
        imports = (
            "import dataclasses\nimport os\nimport time\nfrom pathlib import Path\n\nimport torch\n"
        )
        slow = SLOW.format(folder=str(tmp_path))
        file.write_text(plain.read_text().replace("import torch\n", imports, 1) + slow)
        trial.begin(
            out,
            task="own",
            task_options="file=problem.py",
            algorithm_options="beta=0.01",
            rounds=3,
            deadline=20.0,
        )
        trial.wait_for((tmp_path / "client-1-works").exists, 60)
        trial.nodes[1].kill()
        trial.nodes[1].wait()
        trial.wait_for((out / "y.safetensors").exists, 60)
        faults = [json.loads(text) for text in (out / "faults.jsonl").read_text().splitlines()]
        rounds = _lines(out)
    started = {int(p.read_text()) for p in tmp_path.glob("client-*-works")}
    assert len(started) == 2
    _wait_until_ended(started)
    why = "no answer within 20 s"
    assert faults == [
        {"client": c, "round": 1, "phase": "update_inner", "why": why} for c in (1, 2)
    ]
    assert [done["clients"] for done in rounds] == [3, 3, 1]
    assert set(rounds[2]["absent"]) == {"1", "2"}
    honest, _ = Experiment(
        task="own",
        task_options={"file": str(plain)},
        algorithm_options={"beta": 0.01},
        clients=3,
        rounds=3,
    ).federation()
    honest.ledger.runtime = Alone({i: c.problem for i, c in honest.clients.items()})
    list(honest.run(3))
    for level in ("x", "y"):
        found = load_file(out / f"{level}.safetensors")
        for name, value in getattr(honest.state, level).items():
            assert torch.equal(value, found[name])
