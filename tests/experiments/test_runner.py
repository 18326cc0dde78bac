"""The runner repeats what lacks memory, goes on after Ctrl-C and loses nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from experiments.grid import Changes
from experiments.grids import GRIDS
from experiments.records import FILE, read_records
from experiments.reproduce import longest_first, reproduce
from experiments.runner import lacks_memory, perform_all
from experiments.theory.literal import NAME
from experiments.training import folder_of
from rabo.errors import ClientError
from rabo.execution import room
from rabo.hypergradients import ESTIMATORS
from rabo.runs.experiment import run

ROOT = Path(__file__).parents[2]
GRID = GRIDS["study-errata"]  # its quadratic takes no time
SMALL = Changes(rounds=3, seeds=2, device="cpu", only=["erratum-6"])
LACK = torch.OutOfMemoryError("CUDA out of memory")
MEMORY = {
    "device": LACK,
    "client": ClientError(0, 3, "descend", LACK),
    "library": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    "machine": MemoryError(),
}


@dataclass(frozen=True)
class Item:
    """Work that fails `times` times in its own way, then succeeds."""

    name: str
    record: Path
    times: int = 0
    how: str = "device"


def work(item):
    with item.record.open("a") as file:
        print(item.name, "begins", os.getpid(), room._parts, file=file, flush=True)
    begun = item.record.read_text().count(f"{item.name} begins")
    if begun <= item.times:
        if item.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise MEMORY.get(item.how) or RuntimeError(item.how)
    return f"{item.name} done"


def attempts(record, name):
    return [line.split() for line in record.read_text().splitlines() if line.startswith(name)]


@pytest.mark.parametrize("how", MEMORY)
def test_an_error_of_memory_is_known_by_its_type_text_or_cause(how):
    later = RuntimeError("capture failed")
    later.__context__ = MEMORY[how]
    assert lacks_memory(MEMORY[how])
    assert lacks_memory(later)
    assert not lacks_memory(RuntimeError("the disk is full"))
    assert not lacks_memory(ValueError("memory must be above 0"))


@pytest.mark.slow
def test_items_that_lack_memory_are_repeated_after_the_others(tmp_path):
    record = tmp_path / "record"
    items = [Item("large", record, 1), Item("killed", record, 1, "killed"), Item("a", record)]
    found = [(item.name, result) for item, result in perform_all(work, items, jobs=2)]
    assert found[0] == ("a", "a done")
    assert set(found[1:]) == {("large", "large done"), ("killed", "killed done")}
    shares = {int(words[3]) for words in attempts(record, "")}
    assert len(shares) == 1  # of the device, whatever runs beside it


@pytest.mark.slow
def test_an_item_that_lacks_memory_alone_has_failed(tmp_path):
    record = tmp_path / "record"
    items = [Item("large", record, 9), Item("a", record)]
    found = {item.name: result for item, result in perform_all(work, items, jobs=2)}
    assert isinstance(found["large"], torch.OutOfMemoryError)
    assert found["a"] == "a done"
    assert len(attempts(record, "large")) == 2  # two at a time, then one


def test_if_an_item_fails_the_others_continue(tmp_path):
    record = tmp_path / "record"
    items = [Item("bad", record, 9, "the disk is full"), Item("a", record)]
    found = {item.name: result for item, result in perform_all(work, items, jobs=1)}
    assert "the disk is full" in str(found["bad"])
    assert found["a"] == "a done"
    assert len(attempts(record, "bad")) == 1


def test_within_a_seed_the_last_settings_come_first():
    runs = GRIDS["table-1"].runs(Changes(seeds=2))
    order = longest_first(runs)
    assert sorted(each.name for each in order) == sorted(each.name for each in runs)
    assert [each.seed for each in order] == [0] * (len(runs) // 2) + [1] * (len(runs) // 2)
    assert order[0].setting == "20-way-5-shot"


@pytest.mark.slow
def test_runs_in_processes_have_the_bits_of_runs_in_turn_and_are_not_repeated(tmp_path):
    changes = replace(SMALL, seeds=1)
    found = {
        jobs: reproduce(GRID, tmp_path / str(jobs), changes, jobs=jobs, say=lambda _: None)
        for jobs in (1, 2)
    }
    assert len(found[1]) == 2
    for one, two in zip(found[1], found[2], strict=True):
        assert one.name == two.name
        assert one.metrics == two.metrics
        assert one.curve == two.curve
    path = tmp_path / "1" / GRID.name / FILE
    before = path.read_bytes()
    reproduce(GRID, tmp_path / "1", changes, say=lambda _: None)
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == [FILE]  # folders of runs are gone


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_the_printed_algorithm_2_is_found_by_name_in_every_process(tmp_path, jobs, monkeypatch):
    monkeypatch.delitem(ESTIMATORS, NAME, raising=False)
    changes = Changes(rounds=1, seeds=1, device="cpu", only=["erratum-2-quadratic"])
    records = reproduce(GRID, tmp_path, changes, jobs=jobs, say=lambda _: None)
    assert {each.method for each in records} == {"literal", "corrected"}
    for each in records:
        name = each.content["config"]["algorithm_options"]["hypergradient"]
        assert (name == NAME) == (each.method == "literal")


def test_a_record_has_the_evaluations_with_the_costs_up_to_each(tmp_path):
    only = GRID.runs(SMALL)[0]
    experiment = replace(only.experiment, evaluate_every=1)
    whole = run(experiment, tmp_path / "whole")
    [record] = reproduce(
        GRID, tmp_path, replace(SMALL, seeds=1, only=[only.name]), say=lambda _: None
    )
    assert record.curve["round"] == [1, 2, 3]
    assert record.curve["multiply_adds"][-1] == whole.cost.multiply_adds
    third = whole.history[2].cost.multiply_adds
    assert record.curve["multiply_adds"][1] == whole.cost.multiply_adds - third
    assert record.metrics["distance"] == whole.metrics["distance"]
    assert record.content["versions"]["rabo"]


def test_a_run_on_record_with_other_options_is_refused(tmp_path):
    changes = replace(SMALL, seeds=1)
    reproduce(GRID, tmp_path, changes, say=lambda _: None)
    with pytest.raises(ValueError, match="another rounds"):
        reproduce(GRID, tmp_path, replace(changes, rounds=4), say=lambda _: None)


class CutAfterTwo:
    """Ctrl-C after two rounds."""

    def begin(self, start):
        pass

    def add(self, done):
        if done.round == 1:
            raise KeyboardInterrupt

    def end(self, status):
        assert status == "interrupted"


def test_an_interrupted_run_goes_on_to_the_bits_of_a_whole_run(tmp_path):
    changes = replace(SMALL, seeds=1, only=["erratum-6/corrected"])
    [only] = GRID.runs(changes)
    with pytest.raises(KeyboardInterrupt):
        run(only.experiment, folder_of(only, tmp_path), [CutAfterTwo()])
    [record] = reproduce(GRID, tmp_path, changes, say=lambda _: None)
    assert record.metrics["distance"] == run(only.experiment, tmp_path / "w").metrics["distance"]
    assert record.content["wall_seconds"] is None  # only a part of it was timed


def test_a_run_that_diverges_is_on_record_and_the_others_go_on(tmp_path):
    wild = replace(GRID, tuned={"literal": {"alpha": 1e200}})
    records = reproduce(wild, tmp_path, replace(SMALL, seeds=1), say=lambda _: None)
    assert [(each.method, each.diverged) for each in records] == [
        ("literal", True),
        ("corrected", False),
    ]
    assert records[0].content["why"]


def test_a_mistake_of_the_request_stops_all_runs(tmp_path):
    wrong = replace(GRID, tuned={"literal": {"alpha": -1.0}, "corrected": {"alpha": -1.0}})
    with pytest.raises(ValueError, match="alpha"):
        reproduce(wrong, tmp_path, SMALL, say=lambda _: None)


def begun(out, rounds):
    """Start two runs and wait until both are under way."""
    changes = Changes(rounds=rounds, seeds=1, only=["erratum-6"])
    words = ["--only", "erratum-6", "--seeds", "1", "--rounds", str(rounds), "--device", "cpu"]
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments", GRID.name, *words, "--jobs", "2", "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
        cwd=ROOT,
    )
    records = [folder_of(each, out) / "metrics.jsonl" for each in GRID.runs(changes)]
    until = time.monotonic() + 200
    while not all(path.exists() and path.stat().st_size for path in records):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < until
        time.sleep(0.05)
    return process, [path.parent / "summary.json" for path in records]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_ctrl_c_keeps_the_progress_of_all_runs(tmp_path):
    process, summaries = begun(tmp_path, 100_000)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes
    text, _ = process.communicate(timeout=100)
    assert process.returncode == 130, text
    assert "Traceback" not in text
    for path in summaries:
        summary = json.loads(path.read_text())
        assert summary["status"] == "interrupted"
        assert 0 < summary["rounds"] < 100_000
    assert read_records(tmp_path / GRID.name / FILE) == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_runs_stop_if_their_parent_process_is_killed(tmp_path):
    process, summaries = begun(tmp_path, 100_000)
    process.kill()
    process.communicate()
    until = time.monotonic() + 60
    while not all(path.exists() and "interrupted" in path.read_text() for path in summaries):
        assert time.monotonic() < until
        time.sleep(0.1)
