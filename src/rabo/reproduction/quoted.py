"""Numbers in the sentences of the page, read from the runs: no sentence outlives them.

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
from typing import NamedTuple

from rabo.errors import lookup
from rabo.reproduction.equal_work import ahead
from rabo.reproduction.records import Difference, Record, difference
from rabo.reproduction.results import Results

PLACE = re.compile(r"\{\{(\w+)((?:\s[\w-]+/[\w*-]+/[\w*-]+)+)\}\}")
NOTHING = "not run yet"


class Address(NamedTuple):
    """A cell of a table."""

    grid: str
    setting: str
    method: str


def quote(text: str, results: Results) -> str:
    """Put the numbers in."""

    def made(place: re.Match[str]) -> str:
        number = lookup("number", place[1], KINDS)
        cells = [_cells(results, pattern) for pattern in place[2].split()]
        *most, last = [number(results, *each) for each in zip(*cells, strict=True)]
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
    return "diverged" if cell.value is None else f"{cell.value:.2f}"


def _apart(results: Results, own: Address, other: Address) -> str:
    return _written(difference(_seeds(results, own), _seeds(results, other)))


def _ahead(what: str, results: Results, own: Address, other: Address) -> str:
    return _written(ahead(_seeds(results, own), _seeds(results, other), what))


def _seeds(results: Results, cell: Address) -> Sequence[Record]:
    return results.finished(cell.grid).get(cell[1:], [])


def _written(found: Difference | None) -> str:
    if found is None:
        return NOTHING
    return f"{found.value:+.2f} ± {found.interval:.2f}".replace("-", "−")


def _times(results: Results, own: Address, other: Address) -> str:
    cells = [results.cells(each.grid).get(each[1:]) for each in (own, other)]
    work, base = (cell.multiply_adds if cell else None for cell in cells)
    if not work or not base:
        return NOTHING
    return f"{work / base:.1f}" if work >= base else f"{work / base:.2f}"


KINDS: Mapping[str, Callable[..., str]] = {
    "reached": _reached,
    "apart": _apart,
    "times": _times,
    "ahead": partial(_ahead, "multiply-adds"),
    "ahead_by_bytes": partial(_ahead, "bytes"),
}
