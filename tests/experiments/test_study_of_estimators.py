import pytest
import torch

from experiments import estimators
from experiments.estimators import compare, dense_hypergradient, measure_estimators
from experiments.grid import Changes
from experiments.grids import GRIDS
from experiments.grids.estimators import ESTIMATED
from experiments.tables import table_of
from rabo.seeding import stream
from rabo.tasks.quadratic import ClosedForm, random_quadratic


def problem_at_a_point():
    problem = random_quadratic(stream(0, "quadratic"), 5, 4).client(stream(1))
    x = {"x": torch.randn(5, generator=stream(3), dtype=torch.float64)}
    y = {"y": ClosedForm.of([problem]).inner_solution(x["x"])}
    return problem, x, y, problem.batch(stream(2))


def test_the_dense_hypergradient_is_the_closed_form():
    problem, x, *rest = problem_at_a_point()
    found = dense_hypergradient(problem, x, *rest)
    truth = ClosedForm.of([problem]).hypergradient(x["x"])
    assert found["x"].tolist() == pytest.approx(truth.tolist())


def test_all_estimators_are_compared_with_the_dense_one():
    rows = {row["estimator"]: row for row in compare(*problem_at_a_point())}
    assert set(rows) == set(ESTIMATED)
    assert rows["CG, 20 steps"]["error"] < 1e-9
    assert rows["CG, 20 steps"]["cosine"] == pytest.approx(1)
    assert rows["Algorithm 2 as printed"]["error"] > 0.1


def test_the_study_compares_in_the_rounds_that_it_watches(tmp_path, monkeypatch):
    monkeypatch.setattr(estimators, "WATCHED", (2,))
    grid = GRIDS["study-estimators"]
    tiny = {"channels": 4, "queries": 1, "test_tasks": 2}
    [run] = grid.runs(Changes(rounds=2, seeds=1, task_options=tiny))
    record = measure_estimators(run, tmp_path)
    rows = record.content["rows"]
    assert {row["round"] for row in rows} == {2}
    assert len(rows) == 2 * len(ESTIMATED)  # of two clients
    assert "accuracy" in record.metrics
    assert len(table_of(grid, [record]).splitlines()) == 2 + len(ESTIMATED)
