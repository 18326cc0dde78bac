"""Accuracy within the work of another method: on lines between evaluations."""

import json
from pathlib import Path

import pytest
from fakes import fake_runs
from hypothesis import given
from hypothesis import strategies as st

from rabo.reproduction.equal_work import equal_work_table, within
from rabo.reproduction.grid import Changes, load_grid
from rabo.reproduction.records import Record, read_records

GRID = load_grid("study-efficiency")
RUN = GRID.runs(Changes(seeds=1))[0]


def record(points: list[tuple[float, float]]) -> Record:
    """A run with an accuracy at some multiply-adds."""
    curve = [
        {"metrics": {"accuracy": value, "interval": 0.01 * i}, "spent": {"multiply_adds": spent}}
        for i, (spent, value) in enumerate(points, start=1)
    ]
    return Record(RUN, {}, {"headline": "accuracy", "metrics": {"accuracy": 0.0}}, curve)


@given(share=st.floats(0, 1, exclude_max=True), low=st.floats(0, 1), high=st.floats(0, 1))
def test_between_two_evaluations_it_is_on_the_line(share, low, high):
    found = within(record([(10, low), (30, high)]), 10 + 20 * share)
    assert found is not None
    value, interval = found
    assert value == pytest.approx(100 * (low + share * (high - low)))
    assert interval == pytest.approx(2.0)  # of the later evaluation


def test_before_the_first_evaluation_nothing_is_known():
    assert within(record([(10, 0.5), (30, 0.7)]), 9.9) is None


def test_a_run_without_an_evaluation_has_reached_nothing():
    assert within(record([]), 10) is None


def test_a_run_that_spends_less_is_taken_at_its_end():
    assert within(record([(10, 0.5), (30, 0.7)]), 31) == (pytest.approx(70.0), pytest.approx(2.0))


def test_the_table_compares_within_the_work_of_the_method_that_the_grid_names(tmp_path: Path):
    setting = "5-way-1-shot"
    fake_runs(tmp_path, GRID, {(setting, "rabo"): [0.9, 0.92], (setting, "static"): [0.8]})
    folder = next(tmp_path.rglob("static/seed-0"))
    points = [{"accuracy": 0.4, "interval": 0.02}, {"accuracy": 0.8, "interval": 0.01}]
    lines = [
        {"round": i, "metrics": metrics, "spent": {"multiply_adds": 50 * 3**i}}
        for i, metrics in enumerate(points)
    ]
    (folder / "curve.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = equal_work_table(GRID, read_records(GRID, tmp_path)).splitlines()
    assert table[0] == "|  | 5-way 1-shot |"
    # RABO spends 100 on either seed: halfway between the 50 and the 150 of Static's evaluations
    assert table[2:] == ["| Static | 60.00 ± 1.00* |", "| RABO | 91.00 ± 12.71 |"]


def test_without_that_method_there_is_nothing_to_compare_with(tmp_path: Path):
    fake_runs(tmp_path, GRID, {("5-way-1-shot", "static"): [0.8]})
    assert equal_work_table(GRID, read_records(GRID, tmp_path)) == "Not run yet."
