"""What a mask policy is: an order of the units of each group, of which a client takes the first."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil

import torch
from torch import Generator, Tensor

from rabo.pruning.channels import Channels
from rabo.pruning.submodel import Cut, cut
from rabo.tree import Params


@dataclass(frozen=True, eq=False)
class Whole:
    """The full model of one round, and what policies compute from it once for all clients."""

    channels: Channels
    x: Params
    y: Params
    widths: Mapping[int, float] = field(default_factory=dict)  # of all clients of the round

    @cached_property
    def by_importance(self) -> dict[str, Tensor]:
        """The units of each group, the most important first; ties go to the lower unit."""
        scores = self.channels.importance(self.x, self.y).cpu()
        orders = {}
        for group, n in self.channels.units.items():
            start = self.channels.offsets[group]
            orders[group] = torch.argsort(scores[start : start + n], descending=True, stable=True)
        return orders

    @property
    def device(self) -> torch.device | None:
        values = [*self.x.values(), *self.y.values()]
        return values[0].device if values else None

    def everything(self) -> Cut:
        """Keep all units of every group."""
        return self.take({g: torch.arange(n) for g, n in self.channels.units.items()}, 1.0)

    def take(self, orders: dict[str, Tensor], width: float) -> Cut:
        """Keep the first ⌈width·n⌉ units of each group, sorted."""
        kept = {
            group: order[: num_kept(width, len(order))].sort().values
            for group, order in orders.items()
        }
        return cut(self.channels, kept, self.device)


def num_kept(width: float, num_units: int) -> int:
    """Return ⌈width·n⌉, at least one; the small term forgives 1/3·3 > 1."""
    return max(1, ceil(width * num_units - 1e-9))


class MaskPolicy(ABC):
    """M(θ, R_i): which units a client of a given width trains in a round (line 4)."""

    shared: bool  # clients of equal width get the same submodel, which is then made once

    @abstractmethod
    def __call__(
        self, whole: Whole, width: float, client: int, round: int, generator: Generator
    ) -> Cut:
        """Return the submodel of a client, drawing from its stream of this round."""
