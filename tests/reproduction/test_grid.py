import json
import os
import re
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabo.algorithms import ALGORITHMS
from rabo.federation.solve import make_algorithm
from rabo.reproduction import grid as grids
from rabo.reproduction.grid import (
    TUNED,
    Changes,
    experiments_folder,
    known_grids,
    load_grid,
    merge,
    part_of,
)
from rabo.runs.options import parse_capacities
from rabo.tasks import TASKS

SETTINGS = ["5-way-1-shot", "5-way-5-shot", "20-way-1-shot", "20-way-5-shot"]
FULL = {"dist-protonet", "dist-maml", "fedmbo"}
SUBMODELS = {"static", "oap", "fedrolex", "fiarse", "rabo", "rafbo"}
TABLE_1 = {
    "Dist-ProtoNet": [80.76, 89.33, 60.05, 78.01],
    "Dist-MAML": [81.46, 92.01, 61.36, 78.35],
    "FedMBO": [82.66, 93.69, 63.18, 81.64],
    "Static": [72.34, 85.09, 42.99, 51.01],
    "OAP": [73.58, 86.16, 45.45, 51.92],
    "FedRolex": [73.74, 86.95, 47.25, 55.29],
    "FIARSE": [74.33, 87.78, 49.52, 55.87],
    "RABO": [76.05, 89.12, 54.97, 77.41],
    "RAFBO": [75.09, 88.57, 51.37, 71.16],
}
TABLE_2 = {
    ("RABO", 1): [76.05, 75.81, 74.39, 72.76],
    ("RAFBO", 1): [75.09, 74.85, 73.04, 71.80],
    ("RABO", 5): [89.12, 88.52, 87.76, 86.58],
    ("RAFBO", 5): [88.57, 87.53, 87.03, 86.44],
}


def test_table_1_has_the_methods_settings_and_capacities_of_the_paper():
    grid = load_grid("table-1")
    assert list(grid.settings) == SETTINGS
    runs = grid.runs()
    names = {run.experiment.algorithm.removesuffix("-structured") for run in runs}
    assert names == FULL | SUBMODELS
    assert {run.experiment.seed for run in runs} == {0, 1, 2}
    for run in runs:
        assert parse_capacities(run.experiment.capacities) == [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16]
        ways, shots = re.findall(r"\d+", run.setting)
        options = run.experiment.task_options
        assert (options["ways"], options["shots"]) == (int(ways), int(shots))
        assert (options["dataset"], options["test_tasks"]) == ("omniglot", 600)


def test_both_kinds_of_heads_are_tried_where_an_algorithm_has_heads_and_can_have_its_own():
    heads = {}
    for run in load_grid("table-1").runs(Changes(seeds=1, only=["5-way-1-shot/*"])):
        kind = run.experiment.task_options.get("heads", "per-task")
        heads.setdefault(run.experiment.algorithm, set()).add(kind)
    for name, tried in heads.items():
        if ALGORITHMS[name].is_episodic:
            assert tried == {"per-task"}  # it has a way of its own to meet tasks
        else:
            assert tried == {"shared"} if ALGORITHMS[name].needs_one_y else {"shared", "per-task"}


@pytest.mark.parametrize("name", known_grids())
def test_every_run_of_a_grid_is_made_of_options_that_exist(name):
    grid = load_grid(name)
    runs = grid.runs()
    assert len({run.folder for run in runs}) == len(runs)
    for run in runs:
        experiment = run.experiment
        assert set(experiment.task_options) <= {f.name for f in fields(TASKS[experiment.task])}
        TASKS[experiment.task](**experiment.task_options)
        options = dict(experiment.algorithm_options)
        if isinstance(options.get("beta"), dict):
            options["beta"] = {"rounds": experiment.rounds, **options["beta"]}
        own = ALGORITHMS[experiment.algorithm]
        if hasattr(own, "trained") and "beta" not in options:
            options["beta"] = 0.1  # as the task suggests
        if "beta_x" in options:
            options["levels"] = "both"  # as it suggests too
        make_algorithm(experiment.algorithm, **options)


def test_runs_that_two_grids_share_are_the_same_runs():
    first = {run.folder: run.experiment for run in load_grid("table-1").runs()}
    second = {run.folder: run.experiment for run in load_grid("table-2").runs()}
    shared = first.keys() & second.keys()
    assert {folder.split("/")[2] for folder in shared} == {
        "rabo", "rafbo", "rabo-shared", "rafbo-shared"
    }  # fmt: skip
    assert all(first[folder] == second[folder] for folder in shared)
    assert [run.folder for run in load_grid("figure-cost").runs()] == [
        run.folder for run in load_grid("table-1").runs()
        if run.method.split("-")[0] in ("fedmbo", "rabo", "rafbo")
    ]  # fmt: skip


def test_the_numbers_beside_the_grids_are_the_papers():
    numbers = load_grid("table-1").content["paper"]["numbers"]
    for label, row in TABLE_1.items():
        assert [numbers[setting][label] for setting in SETTINGS] == row
    numbers = load_grid("table-2").content["paper"]["numbers"]
    for (label, shots), row in TABLE_2.items():
        names = [f"5-way-{shots}-shot-{n}-clients" for n in (10, 20, 30, 50)]
        assert [numbers[name][label] for name in names] == row


@pytest.mark.skipif("RABO_PAPER" not in os.environ, reason="RABO_PAPER names no paper.tex")
def test_the_transcription_is_what_the_paper_prints():
    lines = Path(os.environ["RABO_PAPER"]).read_text().splitlines()
    rows = [
        [float(n) for n in re.findall(r"\d\d\.\d+", line)]
        for line in lines
        if line.count("&") == 4 and len(re.findall(r"\d\d\.\d+", line)) == 4
    ]
    assert rows == [*TABLE_1.values(), *TABLE_2.values()]


def test_every_method_is_tuned_with_as_many_candidates(tmp_path):
    unseen = {"tuning-few-shot": "validation", "tuning-loss": "aside"}  # by what is trained
    for name, used_by in (("tuning-few-shot", "table-1"), ("tuning-loss", "figure-tuning")):
        grid, user = load_grid(name), load_grid(used_by)
        methods = {
            about.get("settings_of", method)
            for setting in user.settings
            for method, about in user.methods(setting).items()
        }
        assert set(grid.settings) == methods
        tried = [len({run.method for run in grid.runs() if run.setting == m}) for m in methods]
        assert len(set(tried)) == 1
        assert tried[0] > 1
        assert {run.experiment.task_options["held_out"] for run in grid.runs()} == {unseen[name]}
    uneven = {"experiment": {}, "methods": {}, "candidates": {"a": [{}], "b": []}, "shows": ""}
    (tmp_path / "uneven.json").write_text(json.dumps(uneven))
    with pytest.raises(ValueError, match="as many candidates"):
        load_grid("uneven", folder=tmp_path)


def test_grids_read_what_tuning_has_chosen_and_tuning_does_not(tmp_path):
    tuned = tmp_path / "tuned.json"
    tuned.write_text(json.dumps({"few-shot": {"rabo": {"alpha": 7.0}}}))
    only = Changes(seeds=1, only=["*/rabo/*"])
    for run in load_grid("table-1", tuned).runs(only):
        assert run.experiment.algorithm_options == {"alpha": 7.0}
    for run in load_grid("tuning-few-shot", tuned).runs():
        assert run.experiment.algorithm_options.get("alpha") != 7.0


def test_a_setting_may_have_its_own_tuning_for_some_methods(tmp_path):
    tuned = tmp_path / "tuned.json"
    chosen = {"few-shot": {"rabo": {"alpha": 7.0}, "oap": {"beta": 5.0}}}
    tuned.write_text(json.dumps({**chosen, "few-shot-20": {"oap": {"beta": 3.0}}}))
    for run in load_grid("table-1", tuned).runs(Changes(seeds=1, only=["*/rabo/*", "*/oap/*"])):
        own = {"beta": 3.0 if run.setting.startswith("20") else 5.0}
        assert run.experiment.algorithm_options == ({"alpha": 7.0} if run.method == "rabo" else own)


def test_a_method_may_keep_one_tuning_in_all_settings(tmp_path):
    tuned = tmp_path / "tuned.json"
    both = {"fedmbo": {"alpha": 7.0}, "rabo": {"alpha": 7.0}}
    later = {"fedmbo": {"alpha": 3.0}, "rabo": {"alpha": 3.0}}
    tuned.write_text(json.dumps({"few-shot": both, "few-shot-20": later}))
    runs = load_grid("table-1", tuned).runs(Changes(seeds=1, only=["20-*/rabo", "20-*/fedmbo"]))
    found = {(run.method, run.experiment.algorithm_options["alpha"]) for run in runs}
    assert found == {("rabo", 3.0), ("fedmbo", 7.0)}


def test_a_method_may_have_the_settings_of_another(tmp_path):
    tuned = tmp_path / "tuned.json"
    tuned.write_text(json.dumps({"loss-tuning": {"fedavg": {"beta": 7.0}, "rabo": {"alpha": 9.0}}}))
    grid = load_grid("figure-tuning", tuned)
    for run in grid.runs(Changes(seeds=1)):
        is_single = grid.methods("cifar-10")[run.method]["kind"] == "single-level"
        assert run.experiment.algorithm_options == ({"beta": 7.0} if is_single else {})


def test_what_is_asked_for_wins_over_the_file():
    changes = Changes(rounds=7, seeds=2, device="cpu", task_options={"channels": 8, "queries": 3})
    runs = load_grid("table-1").runs(changes)
    assert {run.experiment.seed for run in runs} == {0, 1}
    for run in runs:
        assert (run.experiment.rounds, run.experiment.device) == (7, "cpu")
        assert run.experiment.task_options["channels"] == "8"  # text, as the task has it
        assert run.experiment.task_options["queries"] == 3


def test_the_page_names_the_settings_that_were_chosen_at_the_border():
    folder = experiments_folder()
    page, chosen = (folder / "page.md").read_text(), json.loads((folder / TUNED).read_text())
    own = chosen["few-shot"]["dist-protonet"]
    assert f"(β = {own['beta']:g}, {own['num_inner_steps']} steps)" in page
    for method in ("static", "oap", "fedrolex", "fiarse"):
        own = chosen["few-shot"][method]
        assert f"the largest step of heads (β = {own['beta']:g})" in page
    assert f"(α = {chosen['few-shot']['fedmbo']['alpha']:g})" in page
    single, bilevel = (chosen["loss-tuning"][m] for m in ("fedavg", "fedmbo"))
    steps = f"(β from {single['beta']['start']:g}, α = {bilevel['alpha']:g})"
    assert f"chose the smallest step that was tried {steps}" in page


@pytest.mark.parametrize("asked", [{"rounds": 0}, {"seeds": 0}, {"rounds": -1}])
def test_no_rounds_and_no_seeds_are_refused(asked):
    with pytest.raises(ValueError, match="must be at least 1"):
        Changes(**asked)


def test_later_options_win_one_by_one_and_an_object_is_replaced_whole():
    first = {"rounds": 1, "algorithm_options": {"a": 1, "policy": {"name": "p", "k": 2}}}
    second = {"rounds": 2, "algorithm_options": {"policy": {"name": "q"}}}
    options = {"a": 1, "policy": {"name": "q"}}
    assert merge(first, second) == {"rounds": 2, "algorithm_options": options}


@given(st.integers(1, 9))
def test_parts_share_all_runs_and_none_twice(count):
    runs = load_grid("study-errata").runs()
    parts = [part_of(runs, (k, count)) for k in range(1, count + 1)]
    assert sorted(run.name for part in parts for run in part) == sorted(run.name for run in runs)


M = ("rabo", "rabo-shared")


@pytest.mark.parametrize(
    ("pattern", "number"),
    [("5-way-1-shot", 2), ("5-way-1-shot/rabo", 1), ("*/rabo", 4), ("5-way", 0), ("*", 8)],
)
def test_the_beginning_of_a_name_up_to_a_slash_chooses_all_below_it(pattern, number):
    names = [
        f"{ways}-way-{shots}-shot/{m}/seed-0" for ways in (5, 20) for shots in (1, 5) for m in M
    ]
    assert sum(grids._is_chosen(name, [pattern]) for name in names) == number
