"""Every block of Python in the documentation runs, and prints what the page says it prints."""

import pytest
import torch
from pages import PAGES, blocks_of, numbers_and_rest

RUNNING = sorted(page for page in PAGES if any(blocks_of(page, "python")))


@pytest.mark.parametrize("page", RUNNING)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace = {"__name__": "page"}
    for block in blocks_of(page, "python"):
        exec(compile("\n" * (block.line - 1) + block.code, page, "exec"), namespace)
        printed = capsys.readouterr().out
        if block.output is not None:
            values, texts = numbers_and_rest(printed)
            expected, words = numbers_and_rest(block.output)
            assert texts == words, printed
            assert values == pytest.approx(expected, rel=0.05, abs=0.01), printed


def test_the_pages_with_code_are_found():
    assert {"README.md", "docs/index.md", "docs/start.md", "docs/own-model.md"} <= set(RUNNING)


def test_a_first_own_problem_takes_ten_lines():
    first = next(blocks_of("README.md", "python")).code
    aside = ("import", "torch.manual_seed")
    code = [line for line in first.splitlines() if line.strip() and not line.startswith(aside)]
    assert len(code) <= 11  # one statement is broken to fit the page
    assert "solve" in first
