"""Count only some rows of the tensors that a client holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rabo.pruning.submodel import Part
from rabo.tree import Params, lay


@dataclass(frozen=True, eq=False)
class OnlyRows(Part):
    """The entries a client holds, except rows it did not train.

    The client still computes with the whole part: only sums and counts leave the rows out.
    """

    part: Part
    rows: Mapping[str, Sequence[int]]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.part.shapes

    @property
    def tensor_shapes(self) -> Mapping[str, tuple[int, ...]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.part.tensor_shapes

    @property
    def device(self) -> torch.device | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.part.device

    @cached_property
    def _counts(self) -> Tensor:
        masks = []
        for name, shape in self.tensor_shapes.items():
            mask = torch.full(shape, name not in self.rows)
            mask[list(self.rows.get(name, ()))] = True
            masks.append(mask)
        flat = lay(masks)
        return flat if self.device is None else flat.to(self.device)

    def take(self, full: Tensor) -> Tensor:
        return self.part.take(full)

    def place(self, values: Tensor) -> Tensor:
        return self.part.place(values)

    def add_to(self, total: Tensor, values: Tensor, times: int = 1) -> None:
        self.part.add_to(total, values * self._counts, times)

    def num_entries(self) -> int:
        return int(self._counts.sum())

    def num_bytes(self, part: Params) -> int:
        return self.part.num_bytes(part)

    def index_bytes(self) -> int:
        return self.part.index_bytes()


def counted(part: Part, rows: Mapping[str, Any] | None) -> Part:
    """Restrict a part to the rows to average; None keeps all."""
    return OnlyRows(part, rows) if rows else part
