import pytest
from fakes import fake_runs

from rabo.reproduction.grid import load_grid
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


def test_a_run_that_diverged_is_quoted_as_such(tmp_path):
    cell = {("5-way-1-shot", "rabo"): [0.8]}
    fake_runs(tmp_path, load_grid("table-1"), cell, status="failed")
    told = quote("{{reached table-1/5-way-1-shot/rabo}}", Results(tmp_path))
    assert told == "diverged"


@pytest.mark.parametrize(
    ("sentence", "message"),
    [
        ("{{reached table-1/*/rab}}", "must be a cell, such as table-1/5-way-1-shot/dist-protonet"),
        ("{{reach table-1/*/rabo}}", "Did you mean 'reached'"),
        ("{{reached table-3/*/rabo}}", "Did you mean 'table-2'|Did you mean 'table-1'"),
        ("{{apart table-1/*/rabo table-1/5-way-*/oap}}", "shorter"),
    ],
)
def test_a_quotation_of_what_there_is_not_is_refused(tmp_path, sentence, message):
    with pytest.raises(ValueError, match=message):
        quote(sentence, Results(tmp_path))
