"""The pages of the documentation, and the blocks of code in them."""

import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "hooks"))
from includes import KINDS, expand  # noqa: E402, F401

PLACES = ("README.md", "docs/*.md", "benchmarks/README.md", "results/*/README.md")
FOUND = [path for place in PLACES for path in sorted(ROOT.glob(place))]
PAGES = {path.relative_to(ROOT).as_posix(): path for path in FOUND}
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$\s*", flags=re.M | re.S)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


class Block(NamedTuple):
    """A fenced block; `output` is that of the text block right after it, if there is one."""

    title: str
    code: str
    output: str | None
    line: int


def blocks_of(page, *languages):
    text = expand(PAGES[page].read_text())
    found = list(FENCE.finditer(text))
    for i, fence in enumerate(found):
        after = found[i + 1] if i + 1 < len(found) else None
        is_output = after is not None and after.start() == fence.end() and after[1] == "text"
        line = text.count("\n", 0, fence.start()) + 2
        if fence[1] in languages:
            yield Block(fence[2], fence[3], after[3] if is_output else None, line)


def numbers_and_rest(text):
    """Split a text into its numbers and what stands between them, spaces aside."""
    rest = [" ".join(part.split()) for part in NUMBER.split(text)]
    return [float(number) for number in NUMBER.findall(text)], rest
