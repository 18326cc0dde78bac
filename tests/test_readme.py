import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_the_code_of_the_readme_runs(block, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_a_first_own_problem_takes_ten_lines():
    code = [line for line in BLOCKS[0].splitlines() if line.strip()]
    assert len(code) - 1 <= 11  # the import aside; one statement is broken to fit the page
    assert "solve" in BLOCKS[0]
