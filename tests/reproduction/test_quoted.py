import json

import pytest
from fakes import fake_run, fake_runs

from rabo.reproduction.equal_work import equal_work_table
from rabo.reproduction.grid import Changes, load_grid
from rabo.reproduction.quoted import quote
from rabo.reproduction.results import Results


@pytest.fixture
def results(tmp_path):
    grid = load_grid("table-1")
    values = {
        ("5-way-1-shot", "rabo"): [0.8, 0.9],
        ("5-way-1-shot", "fedmbo"): [0.85, 0.97],
        ("5-way-5-shot", "rabo"): [0.95],
    }
    for (setting, method), reached in values.items():
        work = 50 if method == "rabo" else 187
        cost = {"multiply_adds": work, "bytes_up": 1, "bytes_down": 1}
        fake_runs(tmp_path, grid, {(setting, method): reached}, cost=cost)
    grid = load_grid("study-variants")
    fake_runs(tmp_path, grid, {("5-way-1-shot", "rabo-rolling"): [0.84, 0.96]})
    return Results(tmp_path)


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("It is {{reached table-1/5-way-*/rabo}}.", "It is 85.00 and 95.00."),
        (
            "({{reached table-1/*/rabo}})",
            "(85.00, 95.00, not run yet and not run yet)",
        ),
        # differences -5 and -7: their mean, and Student's t of two, 12.706 · √2 / √2
        ("{{apart table-1/5-way-1-shot/rabo\ntable-1/5-way-1-shot/fedmbo}}", "−6.00 ± 12.71"),
        (
            "{{apart table-1/5-way-1-shot/rabo study-variants/5-way-1-shot/rabo-rolling}}",
            "−5.00 ± 12.71",
        ),
        ("{{apart table-1/5-way-5-shot/rabo table-1/5-way-5-shot/fedmbo}}", "not run yet"),
        (
            "{{times table-1/5-way-*/fedmbo table-1/5-way-*/rabo}} times",
            "3.7 and not run yet times",
        ),
        ("{{times table-1/5-way-1-shot/rabo table-1/5-way-1-shot/fedmbo}} times", "0.27 times"),
        ("{{table table-1}} is a place of the page", "{{table table-1}} is a place of the page"),
    ],
)
def test_numbers_of_sentences_are_read_from_the_runs(results, sentence, expected):
    assert quote(sentence, results) == expected


def test_a_cell_of_which_a_run_diverged_is_quoted_as_such(tmp_path):
    grid, both = load_grid("table-1"), ("5-way-1-shot", "rabo")
    fake_runs(tmp_path, grid, {both: [0.8]}, status="failed")
    fake_run(tmp_path, grid.runs(Changes(seeds=2, only=["5-way-1-shot/rabo/seed-1"]))[0], 0.8)
    fake_runs(tmp_path, grid, {("5-way-1-shot", "oap"): [0.7, 0.7]})
    results = Results(tmp_path)
    others = "table-1/5-way-1-shot/rabo table-1/5-way-1-shot/oap"
    for place in ("reached table-1/5-way-1-shot/rabo", f"apart {others}", f"ahead {others}"):
        assert quote(f"{{{{{place}}}}}", results) == "diverged"
    found = equal_work_table(results.grid("study-efficiency"), results.records("study-efficiency"))
    assert found == "Not run yet."  # RABO's cost is not known


@pytest.mark.parametrize(
    ("metrics", "told"),
    [({"interval": 0.03}, "+10.00 ± 4.24 (one seed)"), ({}, "+10.00 (one seed)")],
)
def test_one_seed_is_named_and_has_an_interval_where_its_task_has(tmp_path, metrics, told):
    cells = {("5-way-1-shot", "rabo"): [0.9], ("5-way-1-shot", "oap"): [0.8]}
    fake_runs(tmp_path, load_grid("table-1"), cells, metrics=metrics)
    place = "{{apart table-1/5-way-1-shot/rabo table-1/5-way-1-shot/oap}}"
    assert quote(place, Results(tmp_path)) == told


def test_what_a_method_is_ahead_by_multiply_adds_and_by_bytes_differs(tmp_path):
    grid = load_grid("table-1")
    for method, reached, cost in (("rabo", [0.9, 0.9], (50, 40)), ("oap", [0.7, 0.7], (100, 10))):
        spent = {"multiply_adds": cost[0], "bytes_up": cost[1], "bytes_down": 0}
        fake_runs(tmp_path, grid, {("5-way-1-shot", method): reached}, cost=spent)
    for folder in tmp_path.rglob("oap/seed-*"):
        early = {"multiply_adds": 50, "bytes_up": 5, "bytes_down": 0}
        line = {"round": 0, "metrics": {"accuracy": 0.6}, "spent": early}
        curve = folder / "curve.jsonl"
        curve.write_text(json.dumps(line) + "\n" + curve.read_text())
    both = "table-1/5-way-1-shot/rabo table-1/5-way-1-shot/oap"
    assert quote(f"{{{{ahead {both}}}}}", Results(tmp_path)) == "+30.00 ± 0.00"
    assert quote(f"{{{{ahead_by_bytes {both}}}}}", Results(tmp_path)) == "+20.00 ± 0.00"


@pytest.mark.parametrize(
    ("sentence", "message"),
    [
        ("{{reached table-1/*/rab}}", "must be a cell, such as table-1/5-way-1-shot/dist-protonet"),
        ("{{reach table-1/*/rabo}}", "Did you mean 'reached'"),
        ("{{reached table-3/*/rabo}}", "Did you mean 'table-2'|Did you mean 'table-1'"),
        ("{{apart table-1/*/rabo table-1/5-way-*/oap}}", "shorter"),
        ("{{apart table-1/*/rabo}}", "apart takes 2 cells"),
        ("{{reached table-1/*/rabo table-1/*/oap}}", "reached takes 1 cells"),
    ],
)
def test_a_quotation_of_what_there_is_not_is_refused(tmp_path, sentence, message):
    with pytest.raises(ValueError, match=message):
        quote(sentence, Results(tmp_path))
