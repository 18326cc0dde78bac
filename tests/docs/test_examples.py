"""The worked problems of the documentation do what their page says."""

import re
import runpy

import pytest
import torch
from pages import PAGES, ROOT, blocks_of, numbers_and_rest

FOLDER = ROOT / "docs" / "examples"
PAGE = "docs/own-problem.md"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run an example in an empty folder; hold what it prints against the page, if it says so."""
    monkeypatch.chdir(tmp_path)

    def run_and_compare(name):
        found = runpy.run_path(str(FOLDER / name))
        said = [
            block.output for block in blocks_of(PAGE, "py") if f"examples/{name}" in block.title
        ]
        assert len(said) == 1
        values, texts = numbers_and_rest(capsys.readouterr().out)
        expected, words = numbers_and_rest(said[0])
        assert texts == words
        assert values == pytest.approx(expected, rel=0.1, abs=0.01)
        return found

    return run_and_compare


def test_all_examples_are_on_the_page():
    shown = set(re.findall(r"docs/examples/(\w+\.py)", PAGES[PAGE].read_text()))
    assert shown == {path.name for path in FOLDER.glob("*.py")}


def test_tuned_penalties_beat_the_best_single_one_and_y_is_the_closed_form(run):
    found = run("feature_penalties.py")
    assert found["errors"]["tuned"] < 0.8 * found["errors"]["best single penalty"]
    assert found["gap"] < 0.02
    assert found["penalties"][:4].max() < found["penalties"][4:].mean()


def test_careless_annotators_lose_all_trust_and_the_classifier_gains(run):
    found = run("noisy_annotators.py")
    is_careless = torch.isin(torch.arange(8), torch.tensor(found["CARELESS"]))
    assert found["trust"][is_careless].max() < 0.1
    assert found["trust"][~is_careless].min() > 0.8
    assert found["accuracies"]["cleaned"] > found["accuracies"]["as given"] + 0.04


def test_a_learned_representation_beats_random_features_at_half_the_work(run):
    found = run("representation.py")
    assert found["accuracies"]["learned"] > found["accuracies"]["random features"] + 0.15
    assert found["cost"]["multiply_adds"] < 0.6
