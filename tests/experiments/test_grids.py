import os
import re
from dataclasses import fields
from itertools import combinations
from pathlib import Path

import pytest

from experiments.grid import Changes, merge
from experiments.grids import GRIDS
from experiments.grids.few_shot import PAPER_TABLE_1, PAPER_TABLE_2
from experiments.grids.tuned import FIVE_WAY, LOSS, TWENTY_WAY
from experiments.records import FILE, differences, read_records
from experiments.tables import choose
from rabo.algorithms import ALGORITHMS, find_algorithm
from rabo.tasks import TASKS

ROOT = Path(__file__).parents[2]
TUNED = {"tuning-few-shot": FIVE_WAY, "tuning-few-shot-20": TWENTY_WAY, "tuning-loss": LOSS}


@pytest.mark.parametrize("name", GRIDS)
def test_every_run_of_a_grid_is_made_of_options_that_exist(name):
    for run in GRIDS[name].runs(Changes(seeds=1)):
        experiment = run.experiment
        known = {field.name for field in fields(TASKS[experiment.task])}
        assert set(experiment.task_options) <= known
        options = {field.name for field in fields(find_algorithm(experiment.algorithm))}
        assert set(experiment.algorithm_options) <= options


@pytest.mark.parametrize("name", GRIDS)
def test_the_runs_of_a_grid_differ(name):
    runs = GRIDS[name].runs(Changes(seeds=1))
    for one, other in combinations(runs, 2):
        assert one.name != other.name
        if name != "study-errata":  # errata share their corrected form
            assert differences(one.experiment, other.experiment.config())


@pytest.mark.parametrize("name", GRIDS)
def test_the_recorded_runs_are_those_of_the_grid(name):
    records = read_records(ROOT / "results" / name / FILE)
    assert records
    known = {run.name: run for run in GRIDS[name].runs(Changes(seeds=3))}
    for record in records:
        assert differences(known[record.name].experiment, record.content["config"]) == []
        assert not record.diverged


def test_table_1_has_the_settings_and_capacities_of_the_paper():
    runs = GRIDS["table-1"].runs()
    names = {run.experiment.algorithm.removesuffix("-structured") for run in runs}
    full, submodels = "dist-protonet dist-maml fedmbo", "static oap fedrolex fiarse rabo rafbo"
    assert names == {*full.split(), *submodels.split()}
    for run in runs:
        assert run.experiment.capacities == "1,1/2,1/4,1/8,1/16"
        ways, shots = map(int, re.findall(r"\d+", run.setting))
        options = run.experiment.task_options
        assert (options["ways"], options["shots"]) == (ways, shots)


def test_both_kinds_of_heads_are_tried_where_an_algorithm_allows_it():
    heads = {}
    for run in GRIDS["table-1"].runs(Changes(seeds=1, only=["5-way-1-shot"])):
        kind = run.experiment.task_options.get("heads", "per-task")
        heads.setdefault(run.experiment.algorithm, set()).add(kind)
    for name, tried in heads.items():
        assert tried == {"per-task"} if ALGORITHMS[name].is_episodic else {"shared", "per-task"}


@pytest.mark.parametrize("name", TUNED)
def test_tuned_options_are_the_best_candidates_on_held_out_data(name):
    grid = GRIDS[name]
    for run in grid.runs():
        assert run.experiment.task_options["held_out"] in ("validation", "aside")
    assert choose(grid, read_records(ROOT / "results" / name / FILE)) == TUNED[name]


@pytest.mark.parametrize("name", TUNED)
def test_all_methods_have_equally_many_candidates(name):
    grid = GRIDS[name]
    assert len({len(grid.methods_of(setting)) for setting in grid.settings}) == 1


def test_later_options_win_one_by_one():
    base = {"rounds": 3, "task_options": {"ways": 5, "shots": 1}}
    assert merge(base, {"rounds": 4, "task_options": {"shots": 5}}) == {
        "rounds": 4,
        "task_options": {"ways": 5, "shots": 5},
    }


def test_changes_choose_runs_and_replace_options():
    grid = GRIDS["study-errata"]
    changes = Changes(rounds=50, seeds=2, only=["erratum-6/lit*", "erratum-6/corrected/seed-1"])
    runs = grid.runs(changes)
    assert [run.name for run in runs] == [
        "erratum-6/literal/seed-0",
        "erratum-6/literal/seed-1",
        "erratum-6/corrected/seed-1",
    ]
    assert {(run.experiment.rounds, run.experiment.evaluate_every) for run in runs} == {(50, 5)}
    small = grid.runs(Changes(task_options={"dim_x": 4}, only=["erratum-6"]))
    assert small[0].experiment.task_options["dim_x"] == 4
    with pytest.raises(ValueError, match="only must match"):
        grid.runs(Changes(only=["none"]))
    with pytest.raises(ValueError, match="dim_z"):
        grid.runs(Changes(task_options={"dim_z": 4}, only=["erratum-6"]))
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        Changes(rounds=0)


@pytest.mark.skipif("RABO_PAPER" not in os.environ, reason="needs the paper's source")
@pytest.mark.parametrize(
    ("label", "rows"),
    [
        ("tab:baselines", list(PAPER_TABLE_1.items())),
        ("tab:scalability", [(name, row) for (name, _), row in PAPER_TABLE_2.items()]),
    ],
)
def test_the_numbers_of_the_paper_are_those_of_its_source(label, rows):
    source = Path(os.environ["RABO_PAPER"]).read_text()
    tables = re.findall(r"\\begin\{table\*?\}.*?\\end\{table\*?\}", source, flags=re.S)
    [table] = [text for text in tables if label in text]
    lines = [line for line in table.splitlines() if "&" in line]
    for name, numbers in rows:
        shown = [f"{number:.2f}" for number in numbers]
        of_name = [line for line in lines if re.search(rf"\b{re.escape(name)}\b", line)]
        assert any(all(number in line for number in shown) for line in of_name), (name, shown)
