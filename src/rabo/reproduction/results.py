"""The runs below a folder, grid by grid; every grid is read once."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TypeAlias

from rabo.reproduction.grid import load_grid
from rabo.reproduction.records import Cell, Record, cells_of, grouped, read_records

Cells: TypeAlias = Mapping[tuple[str, str], Cell]
Records: TypeAlias = Mapping[tuple[str, str], Sequence[Record]]


class Results:
    """What a folder holds of every grid, read when asked for."""

    def __init__(self, out: Path):
        self.out = out
        self.grid = cache(load_grid)
        self.records = cache(self._records)

    def _records(self, name: str) -> Sequence[Record]:
        return read_records(self.grid(name), self.out)

    def finished(self, name: str) -> Records:
        return grouped([record for record in self.records(name) if not record.diverged])

    def cells(self, name: str) -> Cells:
        found = cells_of(self.grid(name), self.records(name))
        return {(cell.setting, cell.method): cell for cell in found}

    def paper(self, name: str, setting: str, label: str) -> float:
        return self.grid(name).content["paper"]["numbers"][setting][label]
