"""What import-linter cannot say of the source."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "rabo"
FILES = sorted(SOURCE.rglob("*.py"))
REFUSED = {"eval", "exec", "torch.load", "pickle.load", "pickle.loads"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_received_is_unpickled_or_evaluated(path):
    nodes = ast.walk(ast.parse(path.read_text()))
    assert not REFUSED & {ast.unparse(n.func) for n in nodes if isinstance(n, ast.Call)}


def test_at_most_seven_modules_lie_beside_the_rooms():
    assert len([path for path in FILES if path.parent == SOURCE]) <= 7
