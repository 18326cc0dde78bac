"""Numbers in the sentences of the page, read from the runs.

What the words around them say is tested in tests/reproduction/test_page.py.

Cells of tables are named GRID/SETTING/METHOD, or by a pattern such as table-1/*/rabo, which stands
for several, in the order of the grid:

- {{reached CELLS}}: the means over seeds
- {{apart CELLS OTHERS}}: how far they are above others, seed by seed, with the intervals
- {{times CELLS OTHERS}}: their multiply-adds over those of others
- {{ahead CELLS OTHERS}}: how far they end above where others are that have spent as many
  multiply-adds; {{ahead_by_bytes CELLS OTHERS}}: as many bytes
"""

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from math import isnan
from typing import NamedTuple, TypeAlias

from rabo.errors import lookup
from rabo.reproduction.equal_work import ahead
from rabo.reproduction.records import Difference, Record, difference
from rabo.reproduction.results import Results

PLACE = re.compile(r"\{\{(\w+)((?:\s[\w-]+/[\w*-]+/[\w*-]+)+)\}\}")
NOTHING, DIVERGED = "not run yet", "diverged"
Compare: TypeAlias = Callable[[Sequence[Record], Sequence[Record]], Difference | None]


class Address(NamedTuple):
    """A cell of a table."""

    grid: str
    setting: str
    method: str


def quote(text: str, results: Results) -> str:
    """Put the numbers in."""

    def made(place: re.Match[str]) -> str:
        kind, patterns = lookup("number", place[1], KINDS), place[2].split()
        if len(patterns) != kind.num_cells:
            raise ValueError(f"{place[1]} takes {kind.num_cells} cells, got {place[0]}")
        cells = [_cells(results, pattern) for pattern in patterns]
        *most, last = [kind.write(results, *each) for each in zip(*cells, strict=True)]
        return f"{', '.join(most)} and {last}" if most else last

    return PLACE.sub(made, text)


def _cells(results: Results, pattern: str) -> Sequence[Address]:
    name, *_ = pattern.split("/")
    grid = results.grid(name)
    known = [Address(name, s, m) for s in grid.settings for m in grid.methods(s)]
    found = [address for address in known if fnmatchcase("/".join(address), pattern)]
    if not found:
        raise ValueError(f"{pattern} must be a cell, such as {'/'.join(known[0])}")
    return found


def _reached(results: Results, own: Address) -> str:
    cell = results.cells(own.grid).get(own[1:])
    if cell is None:
        return NOTHING
    if cell.value is None:
        return DIVERGED
    return f"{cell.value:.2f}" if "accuracy" in cell.headline else f"{cell.value:.2e}"


def _apart(results: Results, own: Address, other: Address) -> str:
    return _compared(difference, results, own, other)


def _ahead(what: str, results: Results, own: Address, other: Address) -> str:
    return _compared(partial(ahead, what=what), results, own, other)


def _compared(how: Compare, results: Results, own: Address, other: Address) -> str:
    if any(_reached(results, each) == DIVERGED for each in (own, other)):
        return DIVERGED
    found = how(*(results.finished(each.grid).get(each[1:], []) for each in (own, other)))
    if found is None:
        return NOTHING
    interval = "" if isnan(found.interval) else f" ± {found.interval:.2f}"
    alone = " (one seed)" if found.num_seeds == 1 else ""
    return f"{found.value:+.2f}{interval}{alone}".replace("-", "−")


def _times(results: Results, own: Address, other: Address) -> str:
    cells = [results.cells(each.grid).get(each[1:]) for each in (own, other)]
    work, base = (cell.multiply_adds if cell else None for cell in cells)
    if not work or not base:
        return NOTHING
    return f"{work / base:.1f}" if work >= base else f"{work / base:.2f}"


class Kind(NamedTuple):
    """What can be quoted, of how many cells."""

    num_cells: int
    write: Callable[..., str]


KINDS: Mapping[str, Kind] = {
    "reached": Kind(1, _reached),
    "apart": Kind(2, _apart),
    "times": Kind(2, _times),
    "ahead": Kind(2, partial(_ahead, "multiply-adds")),
    "ahead_by_bytes": Kind(2, partial(_ahead, "bytes")),
}
