"""Accuracy within the work of another method: on lines between evaluations."""

import json
from dataclasses import replace
from math import isnan
from pathlib import Path

import pytest
from fakes import fake_runs
from hypothesis import given
from hypothesis import strategies as st

from rabo.reproduction.equal_work import ahead, equal_work_table, within
from rabo.reproduction.grid import Changes, load_grid
from rabo.reproduction.records import Record, read_records

GRID = load_grid("study-efficiency")
RUN = GRID.runs(Changes(seeds=1))[0]


def record(points: list[tuple[float, float]], value: float = 0.0, seed: int = 0) -> Record:
    """A run with an accuracy at some multiply-adds, and at ten times as many bytes."""
    curve = [
        {"metrics": {"accuracy": value, "interval": 0.01 * i}, "spent": cost(spent)}
        for i, (spent, value) in enumerate(points, start=1)
    ]
    last = curve[-1]["spent"] if curve else cost(0)
    summary = {
        "headline": "accuracy",
        "metrics": {"accuracy": value},
        "cost": last,
        "status": "finished",
    }
    run = replace(RUN, experiment=replace(RUN.experiment, seed=seed))
    return Record(run, {}, summary, curve)


def cost(spent: float) -> dict[str, float]:
    return {"multiply_adds": spent, "bytes_up": 4 * spent, "bytes_down": 6 * spent}


@given(share=st.floats(0, 1, exclude_max=True), low=st.floats(0, 1), high=st.floats(0, 1))
def test_between_two_evaluations_it_is_on_the_line(share, low, high):
    run, spent = record([(10, low), (30, high)]), 10 + 20 * share
    for what, times in (("multiply-adds", 1), ("bytes", 10)):
        found = within(run, times * spent, what)
        assert found is not None
        assert found.spent == pytest.approx(times * spent)
        assert found.value == pytest.approx(100 * (low + share * (high - low)))
        assert found.interval == pytest.approx(2.0)  # of the later evaluation


@pytest.mark.parametrize(("spent", "there"), [(9.9, (10, 50, 1)), (31, (30, 70, 2))])
def test_before_the_first_evaluation_and_after_the_last_it_is_these(spent, there):
    run = record([(10, 0.5), (30, 0.7)])
    assert within(run, spent, "multiply-adds") == pytest.approx(there)


def test_a_run_without_an_evaluation_has_reached_nothing():
    assert within(record([]), 10, "multiply-adds") is None


def test_how_far_a_method_is_ahead_is_of_common_seeds_where_the_other_has_spent_as_much():
    own = [record([(20, value)], value, seed) for seed, value in enumerate([0.8, 0.9, 0.7])]
    other = [record([(10, low), (30, 0.9)], 0.9, seed) for seed, low in enumerate([0.5, 0.7])]
    # halfway between its evaluations the other is at 0.7 and 0.8
    found = ahead(own, other, "multiply-adds")
    assert found == pytest.approx((10, 0, 2), abs=1e-9)
    alone = ahead(own, other[:1], "multiply-adds")
    assert alone is not None
    assert (alone.value, isnan(alone.interval), alone.num_seeds) == (pytest.approx(10), True, 1)
    assert ahead(own, [], "multiply-adds") is None


STATIC_BY_BYTES = "| Static | 40.00 ± 2.00* (at 1.25) |"


def test_the_table_compares_within_the_cost_of_the_method_that_the_grid_names(tmp_path: Path):
    setting = "5-way-1-shot"
    fake_runs(tmp_path, GRID, {(setting, "rabo"): [0.9, 0.92], (setting, "static"): [0.8]})
    folder = next(tmp_path.rglob("static/seed-0"))
    points = [{"accuracy": 0.4, "interval": 0.02}, {"accuracy": 0.8, "interval": 0.01}]
    lines = [
        {
            "round": i,
            "metrics": metrics,
            "spent": {"multiply_adds": 50 * 3**i, "bytes_up": 50 + i, "bytes_down": 0},
        }
        for i, metrics in enumerate(points)
    ]
    (folder / "curve.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = equal_work_table(GRID, read_records(GRID, tmp_path)).splitlines()
    own = "| RABO | 91.00 ± 12.71 |"
    # RABO spends 100 on either seed: halfway between the 50 and the 150 of Static's evaluations
    work = ["Within the multiply-adds:", "", "|  | 5-way 1-shot |", "| --- | --- |"]
    assert table[:6] == [*work, "| Static | 60.00 ± 1.00* |", own]
    # and it sends 40 bytes, fewer than Static before its first evaluation
    assert table[6:] == ["", "Within the bytes:", *work[1:], STATIC_BY_BYTES, own]


def test_without_that_method_there_is_nothing_to_compare_with(tmp_path: Path):
    fake_runs(tmp_path, GRID, {("5-way-1-shot", "static"): [0.8]})
    assert equal_work_table(GRID, read_records(GRID, tmp_path)) == "Not run yet."
