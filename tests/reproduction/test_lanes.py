"""Runs side by side are the runs one after the other; nothing is lost when they are stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace

import pytest

from rabo.errors import ClientError
from rabo.reproduction.grid import Changes, load_grid
from rabo.reproduction.lanes import side_by_side
from rabo.reproduction.sweep import dearest_first, sweep

NAME = "study-errata"
ONLY = "erratum-6/*"


@dataclass(frozen=True)
class Item:
    name: str


def answer(item):
    if item.name == "wrong":
        raise ValueError("beta must be positive")
    if item.name == "odd":
        raise OddError(1, 2)
    if item.name == "dies":
        os._exit(9)
    if item.name == "client":
        raise ClientError(3, 1, "train", ValueError("no"))
    return f"{item.name} done"


class OddError(Exception):
    """Cannot be copied to another process: it is made of two things and knows one."""

    def __init__(self, one, two):
        super().__init__(f"{one} is not {two}")


def always():
    return True


def test_runs_side_by_side_are_those_one_after_the_other(tmp_path):
    runs = load_grid(NAME).runs(Changes(rounds=3, seeds=2, device="cpu", only=[ONLY]))
    said = []
    assert sweep(runs, tmp_path / "one", say=lambda _: None) == 0
    assert sweep(runs, tmp_path / "two", jobs=2, say=said.append) == 0
    assert [text.split("]")[0] for text in said] == [f"[{k}/{len(runs)}" for k in (1, 2, 3, 4)]
    assert {text.split()[1].rstrip(":") for text in said} == {run.name for run in runs}
    for run in runs:
        one, two = (
            json.loads((tmp_path / where / run.folder / "summary.json").read_text())
            for where in ("one", "two")
        )
        assert one["metrics"] == two["metrics"]
    assert sweep(runs, tmp_path / "two", jobs=2, say=pytest.fail) == 0  # all are there


def test_every_seed_begins_with_its_last_settings():
    runs = load_grid("table-1").runs(Changes(seeds=2))
    order = dearest_first(runs)
    assert sorted(r.name for r in order) == sorted(r.name for r in runs)
    assert [r.experiment.seed for r in order] == [0] * (len(runs) // 2) + [1] * (len(runs) // 2)
    assert order[0].setting == "20-way-5-shot"
    assert order[len(runs) // 2 - 1].setting == "5-way-1-shot"


def test_no_more_is_begun_when_time_is_up():
    begun = iter([True, True, True, False, False, False, False])
    done = list(side_by_side(answer, [Item(str(i)) for i in range(6)], 2, lambda: next(begun)))
    assert sorted(text for _, text in done) == ["0 done", "1 done", "2 done"]


def test_where_one_fails_others_go_on():
    items = [Item(name) for name in ("wrong", "a", "dies", "odd", "client", "b")]
    found = {item.name: answer for item, answer in side_by_side(answer, items, 5, always)}
    assert found["a"] == "a done"
    assert found["b"] == "b done"
    assert isinstance(found["wrong"], ValueError)
    assert str(found["wrong"]) == "beta must be positive"
    assert "In wrong" in found["wrong"].__notes__[0]
    assert isinstance(found["client"], ClientError)
    assert str(found["client"]) == "client 3 failed in round 2 at train: ValueError: no"
    assert str(found["odd"]) == "OddError: 1 is not 2"
    assert "process of dies ended" in str(found["dies"])


def test_when_all_processes_have_failed_no_more_begin():
    found = list(side_by_side(answer, [Item("wrong")] * 5, 2, always))
    assert 2 <= len(found) <= 3  # one had begun when the second failed


def test_a_reproduction_of_which_runs_fail_says_which_and_ends_with_the_error(tmp_path):
    runs = load_grid(NAME).runs(Changes(rounds=2, seeds=2, device="cpu", only=[ONLY]))
    options = {**runs[0].experiment.algorithm_options, "alpha": -1.0}
    wrong = replace(runs[0], experiment=replace(runs[0].experiment, algorithm_options=options))
    said = []
    with pytest.raises(ValueError, match="alpha"):
        sweep([wrong, *runs[1:]], tmp_path, jobs=2, say=said.append)
    assert sorted(text.split()[0] for text in said) == ["[1/4]", "[2/4]", "[3/4]", wrong.name]


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_ctrl_c_keeps_what_all_have_reached_and_the_same_command_goes_on(tmp_path):
    rounds = 3000
    command = [sys.executable, "-m", "rabo.reproduction", NAME, "--only", ONLY, "--seeds", "1"]
    command += ["--rounds", str(rounds), "--out", str(tmp_path), "--device", "cpu", "--jobs", "2"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, text=True
    )
    runs = load_grid(NAME).runs(Changes(rounds=rounds, seeds=1, only=[ONLY]))
    records = [tmp_path / run.folder / "metrics.jsonl" for run in runs]
    until = time.monotonic() + 120
    while not all(path.exists() and path.stat().st_size for path in records):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "go on" in text
    assert "Traceback" not in text
    for run in runs:
        summary = json.loads((tmp_path / run.folder / "summary.json").read_text())
        assert summary["status"] == "interrupted"
        assert 0 < summary["rounds"] < rounds
    again = subprocess.run([*command, "--limit", "-1"], capture_output=True, text=True, timeout=60)
    assert again.returncode == 3
    assert "2 runs are left" in again.stdout
