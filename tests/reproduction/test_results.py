import json
import os
import re
import shutil
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch
from fakes import fake_run, fake_runs
from hypothesis import given, settings
from hypothesis import strategies as st

from rabo.reproduction.collect import collect
from rabo.reproduction.drawing import panels_by_setting
from rabo.reproduction.estimators import dense_hypergradient, measure_estimators, read_rows
from rabo.reproduction.grid import Changes, Grid, known_grids, load_grid
from rabo.reproduction.page import NOTHING, fill, write_page
from rabo.reproduction.records import cells_of, read_records, spread
from rabo.reproduction.relative import shares_of
from rabo.reproduction.tuning import candidates_table, choose, write_choice
from rabo.seeding import stream
from rabo.tasks.quadratic import ClosedForm, random_quadratic

ROOT = Path(__file__).parents[2]


def test_costs_without_what_they_are_relative_to_have_no_figure(tmp_path):
    grid = load_grid("figure-cost")
    fake_runs(tmp_path, grid, {("5-way-1-shot", "rabo"): [0.8]})
    old = tmp_path / "figure-cost" / "figure.png"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"an old figure")
    collect(grid, tmp_path, tmp_path / "tuned.json")
    assert not old.exists()
    assert json.loads((old.parent / "relative.json").read_text()) == []


@given(st.lists(st.floats(0, 100), min_size=3, max_size=3))
def test_an_interval_over_three_seeds_is_students(values):
    mean, half, over = spread(values)
    assert (mean, over) == (fmean(values), "seeds")
    assert half == pytest.approx(4.303 * stdev(values) / sqrt(3))


def test_one_seed_has_the_interval_over_test_tasks(tmp_path):
    grid = load_grid("table-1")
    cell = {("5-way-1-shot", "rabo"): [0.8]}
    fake_runs(tmp_path, grid, cell, metrics={"interval": 0.01, "full_accuracy": 0.7})
    [found] = cells_of(grid, read_records(grid, tmp_path))
    assert (found.value, found.interval, found.interval_over) == (80, 1, "test tasks")
    assert (found.paper, found.full_model) == (76.05, 70)
    collect(grid, tmp_path, tmp_path / "tuned.json")
    text = (tmp_path / "table-1/table.md").read_text()
    assert "| RABO | 76.05 / **80.00** ± 1.00* (70.00) |" in text
    assert "Per cent: the paper's number / ours with its 95 % interval" in text
    assert "\n\nNot run yet: Dist-ProtoNet (full); Dist-MAML (full); " in text
    assert "| Static" not in text


def candidates(grid, method):
    return [own["run"]["algorithm_options"] for own in grid.methods(method).values()]


@settings(max_examples=15)
@given(st.data())
def test_tuning_chooses_the_best_candidate_of_methods_that_were_tried_in_full(
    tmp_path_factory, data
):
    out = tmp_path_factory.mktemp("out")
    grid = load_grid("tuning-few-shot")
    tried = candidates(grid, "rabo")
    reached = data.draw(st.permutations([0.1 * i for i in range(1, len(tried) + 1)]))
    values = {("rabo", f"candidate-{i}"): [v] for i, v in enumerate(reached, start=1)}
    fake_runs(out, grid, {**values, ("static", "candidate-1"): [0.9]})
    best = tried[reached.index(max(reached))]
    records = read_records(grid, out)
    assert choose(grid, records) == {"rabo": best}
    tuned = out / "tuned.json"
    tuned.write_text(json.dumps({"few-shot": {"oap": {"beta": 1}}, "other": {}}))
    write_choice(grid, records, tuned)
    family = {"oap": {"beta": 1}, "rabo": best}
    assert json.loads(tuned.read_text()) == {"few-shot": family, "other": {}}


def test_a_candidate_that_diverged_is_not_chosen(tmp_path):
    grid = load_grid("tuning-few-shot")
    tried = candidates(grid, "rabo")
    values = {("rabo", f"candidate-{i}"): [0.1 * i] for i in range(1, len(tried))}
    fake_runs(tmp_path, grid, values)
    last = ("rabo", f"candidate-{len(tried)}")
    fake_runs(tmp_path, grid, {last: [1.0]}, status="failed")
    records = read_records(grid, tmp_path)
    assert choose(grid, records) == {"rabo": tried[-2]}
    table = candidates_table(grid, records)
    assert re.search(
        r"\| RABO \| alpha 0.3: 10.00<br>.*<br>\*\*.*: 30.00\*\*<br>.*: diverged \|", table
    )
    assert "\n\nNot run yet: Dist-ProtoNet (full); " in table


@pytest.mark.parametrize("held_out", ["test", "none"])
def test_tuning_refuses_runs_that_saw_test_data_or_what_they_were_trained_on(tmp_path, held_out):
    grid = load_grid("tuning-few-shot")
    changes = Changes(only=["rabo/candidate-1/*"], task_options={"held_out": held_out})
    [seen] = grid.runs(changes)
    fake_run(tmp_path, seen, 0.9)
    with pytest.raises(ValueError, match="validation data"):
        write_choice(grid, read_records(grid, tmp_path, changes), tmp_path / "tuned.json")


def test_coverage_that_is_not_what_a_setting_claims_is_refused(tmp_path):
    grid = load_grid("figure-coverage")
    fake_runs(tmp_path, grid, {("coverage-1", "rabo"): [0.5]}, coverage={"x_min": 1})
    assert len(cells_of(grid, read_records(grid, tmp_path))) == 1
    fake_runs(tmp_path, grid, {("coverage-2", "rabo"): [0.5]}, coverage={"x_min": 1})
    with pytest.raises(ValueError, match="x_min = 2, got 1"):
        cells_of(grid, read_records(grid, tmp_path))


def test_costs_are_relative_to_the_baseline_of_the_same_heads(tmp_path):
    grid = load_grid("figure-cost")
    setting = "20-way-1-shot"
    for method, (work, traffic) in {"fedmbo": (200, 40), "rabo": (50, 10)}.items():
        cost = {"multiply_adds": work, "bytes_up": traffic, "bytes_down": traffic}
        fake_runs(tmp_path, grid, {(setting, method): [0.5]}, cost=cost)
    fake_runs(tmp_path, grid, {(setting, "rabo-shared"): [0.5]})  # its baseline was not run
    found = {
        (s.method, s.what): (s.paper, s.ours) for s in shares_of(grid, read_records(grid, tmp_path))
    }
    assert found == {("rabo", "multiply_adds"): (26.7, 25.0), ("rabo", "bytes"): (26.7, 25.0)}


FIGURES = ("figure-convergence", "study-efficiency", "figure-cost", "figure-coverage")


@pytest.mark.parametrize("name", [*FIGURES, "figure-tuning", "figure-tuning-cost"])
def test_a_figure_shows_all_seeds_of_what_was_run(tmp_path, name):
    grid = load_grid(name)
    setting = list(grid.settings)[-1]
    cells = {(setting, method): [0.4, 0.6] for method in grid.methods(setting)}
    fake_runs(tmp_path, grid, cells, coverage={"x_min": 2})
    said = collect(grid, tmp_path, tmp_path / "tuned.json")
    assert said == [f"{name}: {2 * len(cells)} runs, tables in {tmp_path / name}"]
    assert (tmp_path / name / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_methods_with_a_shared_head_are_drawn_apart(tmp_path):
    grid = load_grid("study-efficiency")
    setting = "5-way-5-shot"
    fake_runs(tmp_path, grid, {(setting, m): [0.5] for m in ("rabo", "static", "rabo-shared")})
    fake_runs(tmp_path, grid, {("5-way-1-shot", "rabo"): [0.5]})
    rows = panels_by_setting(grid, read_records(grid, tmp_path), ["bytes", "multiply_adds"])
    found = [[(panel.axis, list(panel.lines)) for panel in row] for row in rows]
    collect(grid, tmp_path, tmp_path / "tuned.json")  # draws no empty panel
    own, shared = ["Static", "RABO"], ["RABO, shared head"]
    axes = ("bytes", "multiply_adds")
    both = [(["RABO"], own), ([], shared)]
    assert found == [[(axis, a), (axis, b)] for a, b in both for axis in axes]


def test_what_was_not_run_says_so(tmp_path):
    places = "{{table table-1}}\n\n{{figure figure-cost}}\n\n{{runs study-estimators}}\n"
    assert fill(places, tmp_path, tmp_path / "page.md").split("\n\n") == [NOTHING] * 2 + [
        f"{NOTHING}\n"
    ]


def test_the_page_of_results_is_the_one_that_the_runs_give(tmp_path):
    page = tmp_path / "docs" / "results.md"
    write_page(ROOT / "results", page)
    made = page.read_text().replace(f"]({os.path.relpath(ROOT, page.parent)}/", "](../")
    assert made == (ROOT / "docs" / "results.md").read_text(), "run `rabo reproduce page`"


def test_the_runs_that_are_here_give_the_tables_that_are_here(tmp_path, monkeypatch):
    monkeypatch.setitem(collect.__globals__, "FIGURES", {})
    shutil.copytree(ROOT / "results", tmp_path, dirs_exist_ok=True)
    tables = [path for path in tmp_path.glob("*/*") if path.suffix in (".json", ".csv", ".md")]
    before = {path: path.read_text() for path in tables}
    for name in known_grids():
        collect(load_grid(name), tmp_path, tmp_path / "tuned.json")
    for path, text in before.items():
        assert path.read_text() == text, path


def test_the_dense_hypergradient_is_the_closed_form():
    problem = random_quadratic(stream(0, "quadratic"), 5, 4).client(stream(1))
    truth = ClosedForm.of([problem])
    x = {"x": torch.randn(5, generator=stream(3), dtype=torch.float64)}
    y = {"y": truth.inner_solution(x["x"])}
    found = dense_hypergradient(problem, x, y, problem.batch(stream(2)))
    assert found["x"].tolist() == pytest.approx(truth.hypergradient(x["x"]).tolist())


def small_estimators():
    content = dict(load_grid("study-estimators").content)
    content["watched"], content["seeds"] = [2], 1
    own = content["experiment"]
    tiny = {**own["task_options"], "channels": "4", "queries": 1, "test_tasks": 2}
    content["experiment"] = {**own, "task_options": tiny, "rounds": 2, "evaluate_every": 2}
    content["estimators"] = {
        "short": {"name": "conjugate-gradient", "num_iterations": 1},
        "long": {"name": "conjugate-gradient", "num_iterations": 60},
    }
    return Grid("study-estimators", content, {})


def test_estimators_are_watched_where_training_is_and_long_ones_agree_with_the_dense(tmp_path):
    grid = small_estimators()
    assert measure_estimators(grid, grid.runs(), tmp_path, say=lambda _: None) == 0
    assert measure_estimators(grid, grid.runs(), tmp_path, say=pytest.fail) == 0  # it is there
    with pytest.raises(ValueError, match="another rounds; remove it"):
        read_rows(grid, tmp_path, Changes(rounds=3))
    rows = read_rows(grid, tmp_path)
    assert [(row["estimator"], row["round"]) for row in rows] == [("short", 2), ("long", 2)] * 2
    for short, long in zip(rows[::2], rows[1::2], strict=True):
        assert long["error"] < 1e-3 < short["error"]
        assert long["cosine"] > short["cosine"]
        assert long["evaluations"] > short["evaluations"]


def test_estimators_are_measured_only_where_asked_for_and_while_there_is_time(tmp_path):
    grid, ticks = small_estimators(), iter(range(100))
    assert grid.runs(Changes(only=["*/fedmbo/*"])) == []
    runs = grid.runs(Changes(seeds=2, only=["glyphs/rabo/*"]))
    assert [run.name for run in runs] == ["glyphs/rabo/seed-0", "glyphs/rabo/seed-1"]
    left = measure_estimators(grid, runs, tmp_path, limit=0, clock=lambda: next(ticks))
    assert left == 2
    assert not (tmp_path / grid.name).exists()
