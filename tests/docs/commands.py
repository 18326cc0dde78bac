"""Commands as they stand in the documentation, read as the command line reads them."""

import re
import shlex

import typer
from pages import PAGES, blocks_of

from rabo.cli import app

AT_ONCE = {"--help", "--install-completion", "--show-completion"}  # done as soon as they are read


def commands_of(page):
    """Yield the commands of a page's console blocks as lists of words."""
    for block in blocks_of(page, "console"):
        for line in block.code.replace("\\\n", " ").splitlines():
            assert line.startswith("$ "), f"{page}: {line!r} is no command"
            words = shlex.split(line.removeprefix("$"), comments=True)
            while "=" in words[0]:  # variables of the environment
                words = words[1:]
            yield ["1" if re.fullmatch("[A-Z]+", word) else word for word in words]  # N, K, DIR


def rabo_commands(page):
    """Yield the words after `rabo`, of commands in console blocks and of whole ones in the text."""
    for words in commands_of(page):
        if words[0] == "rabo":
            yield words[1:]
    for text in re.findall(r"`rabo ([a-z][^`]*)`", PAGES[page].read_text()):
        words = shlex.split(text)
        if not any(re.search("[A-Z]{2}", word) for word in words):  # TASK stands for something
            yield words


def parse(words):
    """Read a command down to its last option without running it; raise what is wrong with it."""
    name, command, context = "rabo", typer.main.get_command(app), None
    if words[0] in AT_ONCE:
        assert words[0] in {option for parameter in command.params for option in parameter.opts}
        return
    words = [word for word in words if word not in AT_ONCE]
    while words:
        context = command.make_context(name, list(words), parent=context)
        if not hasattr(command, "resolve_command"):
            return
        words = [*context._protected_args, *context.args]
        name, command, words = command.resolve_command(context, words)


def all_commands():
    """Yield every command with its path: groups, and what is in them."""
    waiting = [("rabo", typer.main.get_command(app))]
    while waiting:
        path, command = waiting.pop()
        yield path, command
        waiting += [(f"{path} {n}", c) for n, c in getattr(command, "commands", {}).items()]
