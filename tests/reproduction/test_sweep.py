import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from fakes import fake_run

from rabo.reproduction import request
from rabo.reproduction.collect import collect
from rabo.reproduction.grid import Changes, load_grid
from rabo.reproduction.records import cells_of, read_records
from rabo.reproduction.request import Request
from rabo.reproduction.sweep import differences, sweep
from rabo.runs.experiment import run
from rabo.runs.record import versions

NAME = "study-errata"  # its quadratic takes no time
SMALL = Changes(rounds=3, seeds=2, device="cpu", only=["erratum-6/*"])


class CutAfterTwo:
    """Ctrl-C after two rounds."""

    def begin(self, start):
        pass

    def add(self, done):
        if done.round == 1:
            raise KeyboardInterrupt

    def end(self, status):
        assert status == "interrupted"


def small_runs():
    return load_grid(NAME).runs(SMALL)


def test_a_cut_reproduction_goes_on_and_ends_with_the_table_of_its_summaries(tmp_path):
    runs, ticks, said = small_runs(), iter(range(1000)), []

    first = tmp_path / runs[0].folder
    with pytest.raises(KeyboardInterrupt):
        run(runs[0].experiment, first, [CutAfterTwo()])
    left = sweep(runs, tmp_path, limit=2, say=said.append, clock=lambda: next(ticks))
    assert left == len(runs) - 1  # time was up after the first, which went on from its checkpoint
    assert sweep(runs, tmp_path, say=said.append) == 0
    assert len(said) == len(runs) == 4
    assert sweep(runs, tmp_path, say=pytest.fail) == 0  # all are there

    whole = run(runs[0].experiment, tmp_path / "whole")
    summary = json.loads((first / "summary.json").read_text())
    assert summary["metrics"]["distance"] == whole.metrics["distance"]
    assert abs(datetime.now(UTC) - datetime.fromisoformat(summary["ended"])) < timedelta(hours=1)
    assert summary["most_runs_at_a_time"] == 1
    assert summary["versions"]["code"] == versions()["code"]
    kept = {"config.json", "curve.jsonl", "summary.json"}
    assert {path.name for path in first.iterdir()} == kept

    grid = load_grid(NAME)
    collect(grid, tmp_path, tmp_path / "tuned.json", SMALL)
    cells = json.loads((tmp_path / NAME / "table.json").read_text())["cells"]
    for cell in cells:
        own = [r for r in runs if (r.setting, r.method) == (cell["setting"], cell["method"])]
        texts = [(tmp_path / r.folder / "summary.json").read_text() for r in own]
        values = [json.loads(text)["metrics"]["gradient_norm"] for text in texts]
        assert cell["value"] == pytest.approx(sum(values) / 2)
        assert cell["interval"] == pytest.approx(12.706 * abs(values[0] - values[1]) / 2)
        assert cell["interval_over"] == "seeds"
    assert len(cells) == 2
    text = (tmp_path / NAME / "table.md").read_text()
    assert "Per cent where it is an accuracy: the mean with its 95 % interval" in text
    assert all(f"**{cell['value']:.2e}** ± {cell['interval']:.2e}" in text for cell in cells)


def test_a_curve_has_the_evaluations_with_all_that_was_spent_before(tmp_path):
    only = small_runs()[0]
    only = replace(only, experiment=replace(only.experiment, evaluate_every=2, runtime="plain"))
    result = run(only.experiment, tmp_path / "whole")
    sweep([only], tmp_path, say=lambda _: None)
    lines = (tmp_path / only.folder / "curve.jsonl").read_text().splitlines()
    points = [json.loads(line) for line in lines]
    assert [point["round"] for point in points] == [2, 3]
    assert points[-1]["spent"]["multiply_adds"] == result.cost.multiply_adds
    assert points[-1]["spent"]["bytes_up"] == result.cost.bytes_up
    third = result.history[2].cost.multiply_adds
    assert points[0]["spent"]["multiply_adds"] == result.cost.multiply_adds - third


def test_a_run_with_other_options_is_not_taken_for_the_one_asked_for(tmp_path):
    runs = small_runs()[:1]
    sweep(runs, tmp_path, say=lambda _: None)
    elsewhere = replace(runs[0], experiment=replace(runs[0].experiment, runtime="plain"))
    assert sweep([elsewhere], tmp_path, say=pytest.fail) == 0  # where it ran does not matter
    longer = replace(runs[0], experiment=replace(runs[0].experiment, rounds=4))
    with pytest.raises(ValueError, match="another rounds"):
        sweep([longer], tmp_path)


def test_where_data_lie_makes_no_other_run_and_an_option_not_on_record_had_its_default():
    asked = small_runs()[0]
    config = asked.experiment.config()
    elsewhere = {**config["task_options"], "data_root": "there", "download": True}
    assert differences(asked, {**config, "device": "cuda", "task_options": elsewhere}) == []
    del config["participation"], config["clients"]
    assert differences(asked, config) == []
    fewer = replace(asked, experiment=replace(asked.experiment, participation=0.5))
    assert differences(fewer, config) == ["participation"]


def test_a_run_that_is_not_what_the_grid_asks_for_is_not_collected(tmp_path):
    sweep(small_runs()[:1], tmp_path, say=lambda _: None)
    grid = load_grid(NAME)
    with pytest.raises(ValueError, match=r"seed-0 \(another rounds, evaluate_every\); choose"):
        collect(grid, tmp_path, tmp_path / "tuned.json")
    assert len(read_records(grid, tmp_path, SMALL)) == 1


def test_a_run_that_diverges_is_on_record_and_the_others_go_on(tmp_path):
    changes, said = replace(SMALL, seeds=1), []
    grid = load_grid(NAME)
    wild = {"own": {"literal": {"alpha": 1e200}}}
    grid = replace(grid, content={**grid.content, "tuned": "own"}, tuned=wild)
    assert sweep(grid.runs(changes), tmp_path, say=said.append) == 0
    assert "diverged" in said[0]
    assert "gradient norm" in said[1]
    cells = cells_of(grid, read_records(grid, tmp_path, changes))
    assert [cell.value is None for cell in cells] == [True, False]
    collect(grid, tmp_path, tmp_path / "tuned.json", changes)
    assert "| diverged |" in (tmp_path / NAME / "table.md").read_text()


def test_a_request_downloads_the_data_of_its_runs_once(tmp_path, monkeypatch):
    loaded = []
    for name in request.DOWNLOADS:
        monkeypatch.setitem(
            request.DOWNLOADS, name, lambda download, name=name: loaded.append((name, download))
        )
    asked = Request(name="table-1", out=tmp_path, limit=0.0)
    asked.perform()
    assert loaded == []
    replace(asked, download=True).perform()
    assert loaded == [("omniglot", True)]


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_of_several_experiments_those_without_data_are_left_out(jobs, tmp_path, monkeypatch):
    monkeypatch.setenv("RABO_DATA", str(tmp_path / "nothing"))
    there = load_grid("table-1").runs(Changes(seeds=1, rounds=1, only=["5-way-1-shot/rafbo/*"]))
    fake_run(tmp_path, there[0], 0.5)
    said, wanted = [], ["erratum-6/*/seed-0", "5-way-1-shot/ra*bo/seed-0"]
    asked = Request(name="all", out=tmp_path, only=wanted, rounds=1, device="cpu", jobs=jobs)
    assert asked.perform(said.append) == 3
    left_out = [text for text in said if text.startswith("table-1: left out: ")]
    assert len(left_out) == 1
    assert "use --download" in left_out[0]
    assert "table-1: 1 runs, tables in" in "\n".join(said)  # what is there is collected
    assert said[-1].endswith("their data are missing: 1")
    at_once = ", 1 at a time" if jobs > 1 else ""  # there is no more to do
    assert said[0].endswith(f"1 of 2 runs to do{at_once}, in {tmp_path}")
    assert not any("nothing was run" in text for text in said)  # of what is not asked for
    assert (tmp_path / NAME / "table.md").exists()
    with pytest.raises(FileNotFoundError, match="use --download"):
        replace(asked, name="table-1", only=wanted[1:]).perform(said.append)


def test_a_limit_below_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="limit must be at least 0, got -1"):
        Request(name=NAME, out=tmp_path, limit=-1.0).perform(pytest.fail)


def test_what_cannot_be_done_is_refused_before_a_run_begins(tmp_path):
    nowhere = tmp_path / "nowhere"
    asked = Request(name=NAME, out=tmp_path / "out")
    with pytest.raises(ValueError, match="device must be auto, cpu or cuda"):
        replace(asked, device="tpu").perform(pytest.fail)
    with pytest.raises(ValueError, match=f"data-root must be a folder, got {nowhere}; --download"):
        replace(asked, data_root=str(nowhere)).perform(pytest.fail)
    with pytest.raises(ValueError, match=r"out must hold runs, got none; name the folder .*--out"):
        replace(asked, collect=True).perform(pytest.fail)
    with pytest.raises(ValueError, match="leave --only and --seeds out"):
        replace(asked, collect=True, only=["*/rabo"]).perform(pytest.fail)
    assert list(tmp_path.iterdir()) == []


def test_a_request_runs_collects_and_says_what_is_left(tmp_path):
    said = []
    asked = Request(
        name=NAME,
        out=tmp_path,
        only=["erratum-6/*/seed-0"],
        rounds=1,
        device="cpu",
        option=["dim_x=4"],
        limit=0.0,
    )
    assert asked.perform(said.append) == 3
    assert said[0] == f"{NAME}: 2 of 2 runs to do, in {tmp_path}"
    assert "2 runs are left" in said[-1]
    assert replace(asked, limit=None, part="1/2").perform(said.append) == 0
    assert not (tmp_path / NAME / "table.md").exists()  # the other part may be at it
    assert replace(asked, limit=None).perform(said.append) == 0
    assert (tmp_path / NAME / "table.md").exists()
    with pytest.raises(ValueError, match="K/N"):
        replace(asked, part="3/2").perform()
    with pytest.raises(ValueError, match="only must match some run, such as erratum-"):
        replace(asked, only=["foo/*"]).perform()
