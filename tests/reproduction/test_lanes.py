"""Runs side by side are the runs one after the other; nothing is lost when they are stopped."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rabo.errors import ClientError
from rabo.execution import room
from rabo.reproduction import lanes
from rabo.reproduction.grid import Changes, load_grid
from rabo.reproduction.lanes import side_by_side
from rabo.reproduction.notes import Notes
from rabo.reproduction.sweep import dearest_first, sweep

pytestmark = pytest.mark.slow
NAME = "study-errata"
ONLY = "erratum-6/*"
poisoned = []  # in a process of its own
LACK = torch.OutOfMemoryError("CUDA out of memory")
MEMORY = {
    "device": LACK,
    "client": ClientError(0, 3, "descend", LACK),
    "library": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    "machine": MemoryError(),
}


@dataclass(frozen=True)
class Item:
    name: str


def answer(item, tell):
    if item.name == "talks":
        tell("half of it is done")
    if item.name == "wrong":
        raise RuntimeError("the disk is full")
    if item.name.startswith("large"):
        _, times, cause, record = item.name.split()
        with Path(record).open("a") as file:
            print("begins", item.name, room._parts, file=file, flush=True)
            time.sleep(0.2)
            print("ends", item.name, file=file, flush=True)
        if Path(record).read_text().count(f"begins {item.name}") <= int(times):
            raise MEMORY[cause]
    if item.name == "mistaken":
        raise ValueError("beta must be positive")
    if item.name == "unreadable":
        raise RuntimeError(threading.Lock())
    if item.name == "stuck":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    if item.name == "dies":
        os._exit(9)
    if item.name == "poisons":
        poisoned.append(item)
    if poisoned:
        raise RuntimeError("the device is lost")
    return f"{item.name} done"


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


def test_what_a_run_says_comes_before_what_it_returns():
    items = [Item("talks"), Item("a")]
    found = [(item.name, said) for item, said in side_by_side(answer, items, 2, always)]
    told, done = ("talks", lanes.Note("half of it is done")), ("talks", "talks done")
    assert found.index(told) < found.index(done)
    assert ("a", "a done") in found
    assert len(found) == 3


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_reproduction_says_how_far_its_runs_are(jobs, tmp_path):
    runs = load_grid(NAME).runs(Changes(rounds=3, seeds=1, device="cpu", only=[ONLY]))
    said = []
    sweep(runs, tmp_path, jobs=jobs, every=0.0, say=said.append)
    for run in runs:
        notes = [text for text in said if text.startswith(f"  {run.name}: round ")]
        assert [text.split("round ")[1][:6] for text in notes] == ["1 of 3", "2 of 3"]
        assert all(text.endswith(" left") for text in notes)


def test_a_note_says_what_was_reached_and_how_long_it_may_take():
    now, said = iter([0.0, 10.0, 40.0, 50.0, 80.0, 90.0]), []
    notes = Notes(said.append, every=30.0, clock=lambda: next(now))
    notes.begin(SimpleNamespace(rounds=8, headline="balanced_accuracy", history=[1, 2]))
    for number in range(2, 7):
        metrics = {"balanced_accuracy": 0.5} if number == 2 else {}
        notes.add(SimpleNamespace(round=number, metrics=metrics))
    assert said == [
        "round 4 of 8, balanced accuracy 0.5000, about 0:01:20 left",
        "round 6 of 8, balanced accuracy 0.5000, about 0:00:40 left",
    ]


def test_where_one_fails_others_go_on():
    items = [Item(name) for name in ("wrong", "a", "dies", "unreadable", "b")]
    found = {item.name: answer for item, answer in side_by_side(answer, items, 4, always)}
    assert found["a"] == "a done"
    assert found["b"] == "b done"
    assert found["wrong"].why == "the disk is full"
    assert "in answer" in found["wrong"].traceback
    assert "lock" in found["unreadable"].why
    assert "its process ended" in found["dies"].why


def large(folder, letter, times, cause="device"):
    return Item(f"large {times} {cause} {folder / letter}")


@pytest.mark.parametrize("cause", MEMORY)
def test_an_error_of_memory_is_known_wherever_it_comes_from(cause):
    later = RuntimeError("capture has failed")
    later.__context__ = MEMORY[cause]
    assert lanes._may_lack_memory(MEMORY[cause])
    assert lanes._may_lack_memory(later)
    assert not lanes._may_lack_memory(RuntimeError("the disk is full"))
    assert not lanes._may_lack_memory(ValueError("memory must be above 0"))


def test_what_lacks_memory_is_done_again_when_all_others_have_ended(tmp_path):
    items = [large(tmp_path, "record", 1), *map(Item, "abc")]
    found = [(item.name, said) for item, said in side_by_side(answer, items, 2, always)]
    assert (items[0].name, lanes.Note(lanes.LATER)) in found
    assert found[-1] == (items[0].name, f"{items[0].name} done")
    assert {(name, f"{name} done") for name in "abc"} < set(found)
    assert len(found) == 5


def test_all_that_lack_memory_at_once_are_done_one_by_one(tmp_path):
    """With the share of the device that they had: what a run does must not depend on others."""
    items = [large(tmp_path, "record", 1, cause) for cause in ("device", "client")]
    items += [*map(Item, "ab"), large(tmp_path, "record", 1, "library")]
    found = list(side_by_side(answer, items, 3, always))
    done = [said for _, said in found if not isinstance(said, lanes.Note)]
    assert sorted(done) == sorted(f"{item.name} done" for item in items)
    lines = (tmp_path / "record").read_text().splitlines()
    last = [line.split()[0] for line in lines[-6:]]
    assert last == ["begins", "ends"] * 3  # each alone
    assert {line.split()[-1] for line in lines if "begins" in line} == {"9"}  # of three


@pytest.mark.parametrize(("number", "times"), [(1, 1), (4, 3)])
def test_what_lacks_memory_alone_has_failed(number, times, tmp_path):
    items = [*map(Item, "abc"), large(tmp_path, "record", 9)]
    found = list(side_by_side(answer, items, number, always))
    [(item, failure)] = [each for each in found if isinstance(each[1], lanes.Failure)]
    assert item == items[-1]
    assert failure.why == "CUDA out of memory"
    assert (tmp_path / "record").read_text().count("begins") == times
    assert {f"{name} done" for name in "abc"} <= {said for _, said in found[:-1]}


def test_a_process_that_has_ended_is_tried_again_with_fewer_beside_it():
    found = [said for item, said in side_by_side(answer, [Item("dies"), Item("a")], 2, always)]
    assert lanes.Note(lanes.LATER) in found
    assert "its process ended" in found[-1].why


def test_want_of_memory_between_failures_does_not_hide_how_many_there_are(tmp_path):
    items = [Item("wrong"), large(tmp_path, "record", 1), *[Item("wrong")] * 8]
    found = [said for _, said in side_by_side(answer, items, 2, always)]
    failures = [said for said in found if isinstance(said, lanes.Failure)]
    assert 2 <= len(failures) <= 3  # one had begun when the second failed
    assert not isinstance(found[-1], str)  # none is done again then


def test_after_the_time_none_is_done_again(tmp_path):
    begun = iter([True, True])
    items = [large(tmp_path, "record", 1), Item("a")]
    found = list(side_by_side(answer, items, 2, lambda: next(begun, False)))
    assert sorted(str(said) for _, said in found) == sorted(
        [str(lanes.Note(lanes.LATER)), "a done"]
    )


def test_a_process_that_has_failed_makes_way_for_another():
    items = [Item(name) for name in ("poisons", "a", "b", "c", "d")]
    found = {item.name: answer for item, answer in side_by_side(answer, items, 2, always)}
    assert found.pop("poisons").why == "the device is lost"
    assert found == {name: f"{name} done" for name in "abcd"}


def test_no_more_begin_after_as_many_failures_in_a_row_as_there_are_processes():
    found = list(side_by_side(answer, [Item("wrong")] * 6, 2, always))
    assert 2 <= len(found) <= 3  # one had begun when the second failed
    items = [Item("wrong"), Item("a")] * 3
    assert len(list(side_by_side(answer, items, 1, always))) == 1
    assert len(list(side_by_side(answer, [Item("a"), *items[:1], Item("b")], 2, always))) == 3


def test_processes_that_do_not_even_start_are_failures_too(monkeypatch):
    monkeypatch.setattr(lanes, "_serve", _ends_at_once)
    [(_, found)] = side_by_side(answer, [Item("a")], 1, always)
    assert "its process ended" in found.why


def _ends_at_once(end, do, number):
    os._exit(3)


def test_a_process_that_does_not_stop_is_ended(monkeypatch):
    monkeypatch.setattr(lanes, "PATIENCE", 1)
    under_way = side_by_side(answer, [Item("a"), Item("stuck")], 2, always)
    assert next(under_way)[1] == "a done"
    time.sleep(1)  # the other has begun
    start = time.monotonic()
    under_way.close()
    assert time.monotonic() - start < 20


def test_after_a_mistake_none_begins():
    items = [Item(name) for name in ("a", "mistaken", "b", "c")]
    (_, first), (_, second) = side_by_side(answer, items, 1, always)
    assert first == "a done"
    assert second.mistake is ValueError
    assert second.why == "beta must be positive"


def fake_do(each, tell, out, every, clock, jobs):
    if each.experiment.seed == 0 and each.method == "literal" and not (out / "mended").exists():
        raise RuntimeError("the disk is full")
    return "done"


def test_a_reproduction_of_which_runs_fail_says_which_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[sweep.__module__], "_do", fake_do)
    runs = load_grid(NAME).runs(Changes(rounds=2, seeds=2, device="cpu", only=[ONLY]))
    wrong = next(r for r in runs if r.method == "literal" and r.experiment.seed == 0)
    said = []
    with pytest.raises(ValueError, match=r"of 4 runs 3 are there and 1 failed, .*the disk is full"):
        sweep(runs, tmp_path, jobs=2, say=said.append)
    assert sorted(text.split()[0] for text in said) == ["[1/4]", "[2/4]", "[3/4]", wrong.name]
    kept = tmp_path / f"{wrong.folder}.error.txt"
    assert f"(more in {kept})" in "".join(said)
    assert "Traceback" in kept.read_text()
    (tmp_path / "mended").touch()
    sweep([wrong], tmp_path, jobs=2, say=said.append)
    assert not kept.exists()


def test_a_mistake_is_told_once_as_without_jobs(tmp_path):
    runs = load_grid(NAME).runs(Changes(rounds=2, seeds=2, device="cpu", only=[ONLY]))
    options = {**runs[0].experiment.algorithm_options, "alpha": -1.0}
    wrong = [replace(r, experiment=replace(r.experiment, algorithm_options=options)) for r in runs]
    told = []
    for jobs in (1, 2):
        with pytest.raises(ValueError, match="alpha") as caught:
            sweep(wrong, tmp_path, jobs=jobs, say=pytest.fail)
        told.append(str(caught.value))
    assert told[0] == told[1]
    assert not list(tmp_path.rglob("*.error.txt"))


def test_a_request_to_stop_that_python_has_swallowed_is_heeded_after_the_round(monkeypatch):
    writer = lanes.Heed()
    writer.add("a round")
    monkeypatch.setattr(lanes, "_stopping", threading.Event())
    with pytest.raises(KeyboardInterrupt):
        lanes._stop()
    with pytest.raises(KeyboardInterrupt):
        writer.add("a round")


def command(out, rounds):
    asked = [sys.executable, "-m", "rabo.reproduction", NAME, "--only", ONLY, "--seeds", "1"]
    return [*asked, "--rounds", str(rounds), "--out", str(out), "--device", "cpu", "--jobs", "2"]


def begun(out, rounds):
    """Start a reproduction and wait until both of its runs are under way."""
    process = subprocess.Popen(
        command(out, rounds),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )
    runs = load_grid(NAME).runs(Changes(rounds=rounds, seeds=1, only=[ONLY]))
    records = [out / run.folder / "metrics.jsonl" for run in runs]
    until = time.monotonic() + 120
    while not all(path.exists() and path.stat().st_size for path in records):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    return process, records


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_ctrl_c_keeps_what_all_have_reached_and_the_same_command_goes_on(tmp_path):
    rounds = 3000
    process, records = begun(tmp_path, rounds)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
    text, _ = process.communicate(timeout=100)
    assert process.returncode == 130
    assert "go on" in text
    assert "Traceback" not in text
    for path in records:
        summary = json.loads((path.parent / "summary.json").read_text())
        assert summary["status"] == "interrupted"
        assert 0 < summary["rounds"] < rounds
    asked = [*command(tmp_path, rounds), "--limit", "0"]
    again = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    assert again.returncode == 3
    assert "2 runs are left" in again.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_runs_stop_with_the_process_that_has_begun_them(tmp_path):
    rounds = 100_000
    process, records = begun(tmp_path, rounds)
    process.kill()
    process.communicate()
    summaries = [path.parent / "summary.json" for path in records]
    until = time.monotonic() + 60
    while not all(s.exists() and "interrupted" in s.read_text() for s in summaries):
        assert time.monotonic() < until
        time.sleep(0.1)
