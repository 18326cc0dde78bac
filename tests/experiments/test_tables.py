import math
import re
from dataclasses import replace
from math import sqrt
from pathlib import Path

import pytest
from made_up import CURVE, record

from experiments import pages
from experiments.grid import Grid, Method, Setting
from experiments.records import FILE, Record, add_record, grouped, read_records
from experiments.statistics import ahead, difference, full_model, mean_of, mean_within, within
from experiments.tables import accuracy_table, candidates_table, choose, cost_table, table_of

ROOT = Path(__file__).parents[2]
GRID = Grid(
    name="small",
    title="A small grid",
    base={"task": "digits", "algorithm": "rabo", "rounds": 3},
    settings={"one": Setting(label="One", paper={"RABO": 76.05}), "two": Setting(label="Two")},
    methods={
        "rabo": Method(label="RABO", paper="RABO", run={}),
        "fedmbo": Method(label="FedMBO", run={"algorithm": "fedmbo"}),
        "none": Method(label="Nothing", run={}),
    },
)
T_1, T_2 = 12.7062047, 4.3026527  # 97.5 % quantiles of Student's t with 1 and 2 degrees of freedom


def test_a_table_has_the_paper_the_mean_and_the_interval_over_seeds(tmp_path):
    path = tmp_path / FILE
    for seed, value in enumerate((0.5, 0.6, 0.7)):
        add_record(path, record("one", "rabo", seed, value))
    add_record(path, record("two", "fedmbo", 0, 0.25, metrics={"interval": 0.01}))
    rows = [line.split("|")[1:-1] for line in table_of(GRID, read_records(path)).splitlines()]
    cells = [[cell.strip() for cell in row] for row in rows]
    interval = T_2 * 10 / sqrt(3)  # of 50, 60 and 70, whose deviation is 10
    assert cells[0] == ["", "One", "Two"]
    assert cells[2] == ["RABO", f"76.05 / 60.00±{interval:.2f}", "–"]
    assert cells[3] == ["FedMBO", "–", "25.00±1.00*"]
    assert len(cells) == 4  # a method without runs is left out


def test_rows_may_be_settings():
    groups = grouped([record("one", "rabo", 0, 0.5)])
    table = accuracy_table(GRID.settings, GRID.methods, groups, settings_are_rows=True)
    assert [line.split("|")[1].strip() for line in table.splitlines()] == ["", "---", "One", "Two"]


def test_a_run_that_diverged_takes_its_cell():
    records = [record("one", "rabo", 0, 0.5), record("one", "rabo", 1, 0.5, status="failed")]
    assert mean_of(records).value is None
    assert "diverged" in table_of(GRID, records)


def test_the_full_model_is_shown_where_it_differs():
    assert full_model([record("one", "rabo", 0, 0.5, metrics={"full_accuracy": 0.25})]) == 25
    assert full_model([record("one", "rabo", 0, 0.5, metrics={"full_accuracy": 0.5})]) is None
    assert full_model([record("one", "rabo", 0, 0.5)]) is None


def test_a_difference_is_taken_seed_by_seed():
    own = [record("one", "rabo", seed, value) for seed, value in enumerate((0.5, 0.7, 0.9))]
    other = [record("one", "fedmbo", seed, value) for seed, value in enumerate((0.4, 0.5))]
    found = difference(own, other)
    assert found.value == pytest.approx(15)
    assert found.interval == pytest.approx(T_1 * 10 / sqrt(2) / sqrt(2))
    assert found.num_seeds == 2
    alone = difference(
        [record("one", "rabo", 0, 0.5, metrics={"interval": 0.03})],
        [record("one", "fedmbo", 0, 0.4, metrics={"interval": 0.04})],
    )
    assert alone.interval == pytest.approx(5)
    assert difference(own, []) is None


def test_a_cost_is_a_share_of_the_baseline():
    records = [record("one", "rabo", 0, 0.5, work=100), record("one", "fedmbo", 0, 0.5, work=400)]
    table = cost_table(GRID.settings, GRID.methods, grouped(records), {"rabo": "fedmbo"})
    assert "| multiply-adds, RABO | 25.000 | – |" in table
    assert "| bytes, RABO | 100.000 | – |" in table


@pytest.mark.parametrize(
    ("budget", "value", "spent"),
    [(50, 20, 100), (100, 20, 100), (150, 30, 150), (200, 40, 200), (250, 60, 250), (900, 80, 300)],
)
def test_within_a_cost_a_run_lies_on_the_line_between_two_evaluations(budget, value, spent):
    found = within(record("one", "rabo", 0, 0.8), budget, "multiply_adds")
    assert (found.value, found.spent) == (pytest.approx(value), spent)


def test_within_a_cost_the_mean_is_over_seeds_and_needs_all_of_them():
    lower = {**CURVE, "accuracy": [0.0, 0.2, 0.6]}
    both = [record("one", "rabo", 0, 0.8), record("one", "rabo", 1, 0.6, curve=lower)]
    mean, share = mean_within(both, 60, "bytes")  # between 40 and 80 bytes
    assert mean.value == pytest.approx(20)
    assert share == 1
    unknown = {name: [] for name in CURVE}
    both[1] = record("one", "rabo", 1, 0.6, curve=unknown)
    assert mean_within(both, 60, "bytes") is None


def test_ahead_compares_an_end_with_others_at_the_same_cost():
    own, other = record("one", "rabo", 0, 0.9, work=150), record("one", "fedmbo", 0, 0.8)
    found = ahead([own], [other], "multiply_adds")
    assert found.value == pytest.approx(90 - 30)
    assert math.isnan(found.interval)


def test_the_best_candidate_is_chosen_once_all_are_there():
    options = [{"alpha": 0.1}, {"alpha": 0.3}]
    rows = {
        f"candidate-{i}": Method(label=f"alpha {own['alpha']}", run={"algorithm_options": own})
        for i, own in enumerate(options, start=1)
    }
    grid = replace(GRID, settings={"rabo": Setting(label="RABO", methods=rows)})
    first = record("rabo", "candidate-1", 0, 0.5)
    assert choose(grid, [first]) == {}
    both = [first, record("rabo", "candidate-2", 0, 0.6)]
    assert choose(grid, both) == {"rabo": {"alpha": 0.3}}
    assert "**alpha 0.3: 60.00**" in candidates_table(grid, both)
    wild = [first, record("rabo", "candidate-2", 0, 0.6, status="failed")]
    assert choose(grid, wild) == {"rabo": {"alpha": 0.1}}


def test_coverage_that_is_not_that_of_the_setting_is_refused():
    grid = replace(GRID, settings={"one": Setting(label="One", coverage={"x_min": 2})})
    with pytest.raises(ValueError, match="x_min = 2, got 1"):
        table_of(grid, [record("one", "rabo", 0, 0.5)])


def test_records_are_read_as_they_were_added(tmp_path):
    path = tmp_path / "new" / FILE
    assert read_records(path) == []
    for seed in (0, 1):
        add_record(path, record("one", "rabo", seed, 0.5, why="‖∇Φ‖"))
    assert [each.seed for each in read_records(path)] == [0, 1]
    assert read_records(path)[1] == record("one", "rabo", 1, 0.5, why="‖∇Φ‖")


def test_a_page_keeps_its_text_and_gets_new_tables(monkeypatch):
    monkeypatch.setattr(pages, "TABLES", {"small": lambda results: "| new |"})
    page = "before\n<!-- table small -->\n| old |\n<!-- end -->\nafter\n"
    assert pages.fill(page, None) == page.replace("old", "new")
    with pytest.raises(KeyError):
        pages.fill(page.replace("small", "other"), None)


def test_the_tables_of_the_pages_are_those_of_the_records():
    results = pages.Results(ROOT / "results")
    paths = [path for pattern in pages.PAGES for path in ROOT.glob(pattern)]
    named = set()
    for path in paths:
        text = path.read_text()
        named |= set(re.findall(r"<!-- table ([\w-]+) -->", text))
        assert pages.fill(text, results) == text, f"{path}: run python -m experiments tables"
    assert named <= set(pages.TABLES)
    assert all((ROOT / "results" / name).exists() for name in pages.FIGURES)


def test_an_accuracy_is_per_cent_and_another_headline_is_not():
    own = record("one", "rabo", 0, 0.5)
    assert own.value == 50
    norm = Record({**own.content, "headline": "gradient_norm", "metrics": {"gradient_norm": 0.5}})
    assert norm.value == 0.5
