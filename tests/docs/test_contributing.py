import inspect
import re
import sys
from pathlib import Path

import pytest

from rabo.algorithms import ALGORITHMS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "algorithms"))
import test_contract as contract  # noqa: E402

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
FILE, REGISTRATION = re.findall(r"```python\n(.*?)```", TEXT, flags=re.S)


@pytest.fixture
def example(monkeypatch):
    """Register the example as the page says, for one test."""
    known = dict(ALGORITHMS)
    namespace = {"ALGORITHMS": known}
    exec(compile(FILE + REGISTRATION, "CONTRIBUTING.md", "exec"), namespace)
    [name] = known.keys() - ALGORITHMS.keys()
    monkeypatch.setitem(ALGORITHMS, name, known[name])
    return name


CHECKS = {n: f for n, f in vars(contract).items() if n.startswith("test_")}


@pytest.mark.parametrize("check", CHECKS)
def test_the_example_of_an_algorithm_keeps_the_contract(check, example):
    others = {"missing": {2}, "pause": 1}
    wanted = inspect.signature(CHECKS[check]).parameters
    CHECKS[check](example, **{key: value for key, value in others.items() if key in wanted})
