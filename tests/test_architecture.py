"""Imports go down only, and what is registered keeps its contract."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "rabo"

LAYERS = [
    ["errors", "seeding", "tree"],
    ["files"],
    ["pruning"],
    ["problems"],
    ["hypergradients"],
    ["exchange"],
    ["algorithms", "execution"],
    ["federation"],
    ["checking"],
    ["models"],
    ["tasks"],
    ["runs"],
    ["theory", "bench", "reproduction", "flower"],
    ["cli"],
    ["__main__", "__init__"],
]
LEVEL = {name: i for i, layer in enumerate(LAYERS) for name in layer}
FILES = sorted(SOURCE.rglob("*.py"))


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """The packages of rabo that a file imports at its top level."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rabo":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return found & set(LEVEL)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_down_only(path):
    own = package_of(path)
    assert own in LEVEL, f"{own} has no layer yet: add it to LAYERS"
    for other in imports_of(path) - {own}:
        assert LEVEL[other] < LEVEL[own], f"{own} must not import {other}"


def test_an_estimator_never_sees_a_mask_and_a_mask_never_sees_a_loss():
    for path in FILES:
        if package_of(path) == "hypergradients":
            assert "rabo.pruning.policies" not in path.read_text()


def test_only_the_flower_package_imports_flower():
    for path in FILES:
        names = {n.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.alias)}
        froms = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
        found = {name.split(".")[0] for name in names | {n.module or "" for n in froms}}
        assert "flwr" not in found or package_of(path) == "flower", path


def test_nothing_received_is_unpickled_or_evaluated():
    for path in FILES:
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        names = {ast.unparse(call.func) for call in calls}
        assert not names & {"eval", "exec", "torch.load", "pickle.load", "pickle.loads"}, path
