"""What keeps the repository in order agrees with itself."""

import re
import tomllib
from pathlib import Path

import yaml

import rabo

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_one_version_and_one_licence_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert PROJECT["version"] == rabo.__version__ == citation["version"]
    assert PROJECT["license"] == citation["license"]


def test_the_citation_names_the_paper_of_the_algorithm():
    paper = yaml.safe_load((ROOT / "CITATION.cff").read_text())["preferred-citation"]
    families = ", ".join(author["family-names"] for author in paper["authors"])
    assert rabo.RABO.paper == f"{families}: {paper['title']}"


def test_a_commit_is_checked_by_what_make_lint_runs():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    commands = {h["entry"].removeprefix(".venv/bin/") for repo in hooks for h in repo["hooks"]}
    recipe = re.search(r"^lint:.*?\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), flags=re.M)
    lint = [line.strip().removeprefix("$(BIN)/") for line in recipe[1].splitlines()]
    assert commands == {re.sub(r" --check| \.$", "", line).removesuffix(" .") for line in lint}
    assert {repo["repo"] for repo in hooks} == {"local"}


def test_what_is_pinned_is_what_the_project_asks_for():
    """Every direct dependency, of any extra, has one tested version in constraints.txt."""
    asked = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    names = {re.match(r"[\w.-]+", line)[0].lower() for lines in asked for line in lines}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0] for line in lines if not line.startswith("#")}
    assert names - {"rabo"} <= pinned
