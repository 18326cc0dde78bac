"""What pages show of the code and of measurements is read from them: it cannot go stale.

A page has a link `[KIND: WHAT](FILE)` on a line of its own. In the repository one follows it; in
the site what it names stands in its place. Code is fenced as `py`, which says that it is shown and
not run: blocks that say `python` are run by the tests.
"""

import importlib
import inspect
import json
import re
import sys
import textwrap
from functools import reduce
from pathlib import Path

from rabo.cli.algorithms import exchanges_of_algorithms, papers_of_algorithms

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))
from benchmarks.parts.report import table  # noqa: E402


def on_page_markdown(markdown, page, config, files):
    return expand(markdown)


def expand(markdown):
    link = re.compile(rf"^\[({'|'.join(KINDS)}): (.+?)\]\(\S+\)$", flags=re.M)
    return link.sub(lambda found: KINDS[found[1]](found[2]), markdown)


def source(name):
    """Show a class, method or function, given as MODULE:NAME."""
    module, _, path = name.partition(":")
    found = reduce(getattr, path.split("."), importlib.import_module(module))
    lines, first = inspect.getsourcelines(found)
    title = f"{module.replace('.', '/')}.py"
    numbered = f'title="src/{title}" linenums="{first}"'
    return f"``` {{ .py {numbered} }}\n{textwrap.dedent(''.join(lines))}```"


def file(name):
    return f'```py title="{name}"\n{(ROOT / name).read_text()}```'


def measured(name):
    """Show the rows of a benchmark in which a column has a value, given as FILE COLUMN=VALUE."""
    path, _, chosen = name.partition(" ")
    column, _, value = chosen.partition("=")
    rows = json.loads((ROOT / path).read_text())["rows"]
    return table([{k: row[k] for k in row if k != column} for row in rows if row[column] == value])


def algorithms(_):
    return table(exchanges_of_algorithms())


def papers(_):
    return table(papers_of_algorithms())


KINDS = {kind.__name__: kind for kind in (source, file, measured, algorithms, papers)}
