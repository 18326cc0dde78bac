"""Every command in the documentation and in the help texts is one that the command line takes."""

import re
import shlex

import pytest
from commands import all_commands, commands_of, parse, rabo_commands
from pages import PAGES, ROOT
from typer.testing import CliRunner

from rabo.cli import app

COMMANDS = [(page, words) for page in sorted(PAGES) for words in rabo_commands(page)]
QUICK = {"run", "resume", "compare", "algorithms", "report"}


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[" ".join(w) for _, w in COMMANDS])
def test_a_command_of_the_documentation_is_understood(page, words):
    parse(words)


@pytest.mark.parametrize(
    "words",
    [
        ["runn"],
        ["run", "digit"],
        ["run", "digits", "--round", "3"],
        ["run", "digits", "--rounds", "x"],
    ],
)
def test_a_command_that_is_wrong_would_be_noticed(words):
    with pytest.raises(Exception, match=r"No such|valid"):
        parse(words)


@pytest.mark.parametrize("page", sorted(PAGES))
def test_make_targets_and_files_in_commands_exist(page):
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.M)
    for words in commands_of(page):
        assert words[0] in ("rabo", "make", "pip", "python", "bash", "flwr"), words
        if words[0] == "make":
            assert words[1] in targets
        if words[0] in ("python", "bash") and not words[1].startswith("-"):
            assert (ROOT / words[1]).exists()


def test_the_commands_of_the_start_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = [words[1:] for words in commands_of("docs/start.md") if words[1] in QUICK]
    assert {words[0] for words in commands} == QUICK
    for words in commands:
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, f"{words}: {done.output}"


@pytest.mark.parametrize(("path", "command"), list(all_commands()), ids=lambda c: str(c))
def test_the_help_of_a_command_says_what_it_does_and_gives_an_example_that_works(path, command):
    assert command.help
    example = re.fullmatch(r"Example: (rabo .*)", command.epilog or "")
    assert example, f"{path} has no example in its epilog"
    words = shlex.split(example[1])
    assert " ".join(words).startswith(path)
    parse(words[1:])


def test_every_option_says_what_it_means():
    for path, command in all_commands():
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{path} {parameter.name}"
