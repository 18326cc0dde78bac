"""Real processes, TLS and authentication: the bits of one process, and rounds that go on."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from trial import Trial

from rabo.experiment import Experiment, run
from rabo.flower.credentials import make_keys

DIGITS = {"width": 16}
OPTIONS = {"num_inner_steps": 3}
CAPACITIES = "1,1/2,1/4"


def assert_same(a: Path, b: Path) -> None:
    for name in ("x.safetensors", "y.safetensors"):
        mine, theirs = load_file(a / name), load_file(b / name)
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert torch.equal(value, theirs[key]), (name, key)


def test_a_federation_of_processes_gives_the_bits_of_one_process(tmp_path):
    with Trial(tmp_path / "trial") as trial:
        make_keys(tmp_path / "trial", 4)  # of client 3, whom nobody registered
        stranger = trial.join(3)
        for algorithm in ("rabo", "rafbo"):
            plain, sent = tmp_path / algorithm, tmp_path / f"{algorithm}-sent"
            summary = trial.run(
                sent,
                task="digits",
                task_options="width=16",
                algorithm=algorithm,
                algorithm_options="num_inner_steps=3",
                capacities=CAPACITIES,
                rounds=2,
            )
            run(
                Experiment(
                    task="digits",
                    task_options=DIGITS,
                    algorithm=algorithm,
                    algorithm_options=OPTIONS,
                    clients=3,
                    capacities=CAPACITIES,
                    rounds=2,
                    device="cpu",
                ),
                plain,
            )
            assert summary["status"] == "finished"
            assert_same(plain, sent)
            assert not (sent / "faults.jsonl").exists()
        assert stranger.wait(timeout=30) != 0  # refused, and told so
    assert all(process.poll() is not None for process in trial.children.processes)


PROBLEM = '''
"""The problem of the template, with a client 1 that says when it works and a slow client 2."""
import time
from pathlib import Path

import torch

import rabo
from {template} import problem as plain, template as empty

SIGNAL = Path({signal!r})


def template():
    return empty()


def problem(partition, num_partitions):
    own = plain(partition, num_partitions)

    def sample(data, generator):
        if SIGNAL.with_suffix(".go").exists() and partition > 0:
            SIGNAL.with_suffix(f".{{partition}}").touch()
            time.sleep(60)
        return data

    return rabo.Problem(
        inner=own.problem.inner, outer=own.problem.outer, x=own.problem.x, y=own.problem.y,
        axes=own.problem.axes, sample=sample,
    ).on(inner=own.data.inner, outer=own.data.outer)
'''
