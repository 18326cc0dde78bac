"""The notebook runs from top to bottom, and prints what it was committed with."""

import nbclient
import nbformat
import pytest
from pages import ROOT, numbers_and_rest

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def printed(notebook):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "\n".join(output.text for output in outputs if output.output_type == "stream")


def num_pictures(notebook):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.slow
def test_the_notebook_runs_and_prints_what_it_shows(tmp_path):
    shown, fresh = (nbformat.read(NOTEBOOK, as_version=4) for _ in range(2))
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(fresh, timeout=600, kernel_name="python3", resources=where).execute()
    values, texts = numbers_and_rest(printed(fresh))
    expected, words = numbers_and_rest(printed(shown))
    assert texts == words
    assert values == pytest.approx(expected, rel=0.05, abs=0.02)
    assert num_pictures(fresh) == num_pictures(shown) == 1


def test_the_notebook_is_small():
    assert NOTEBOOK.stat().st_size < 100_000
