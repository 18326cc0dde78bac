"""Regions by rank, dealt to the clients so that every one is covered (OAP)."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from rabo.pruning.policies.entries import cut_entries, ranks
from rabo.pruning.policies.policy import MaskPolicy, Whole, num_kept
from rabo.pruning.submodel import Cut, cut

EPSILON = 1e-9  # forgives 1/3·3 < 1


@dataclass(frozen=True)
class _Dealt(MaskPolicy):
    num_regions: int = 4
    shared = False

    def __post_init__(self) -> None:
        if self.num_regions < 1:
            raise ValueError(f"num_regions must be at least 1, got {self.num_regions}")


@dataclass(frozen=True)
class Regions(_Dealt):
    """Rank the weights of a level by |w| into equal regions; keep the top one and deal the others.

    A client of width r may keep a fraction r² of the entries: the top region and as many others as
    fit, dealt in turn over the clients of a round from a start that moves by one a round. Every
    region is covered where the clients have room for it (Zhou et al., 2023). A client that has no
    room for one region keeps the largest entries of the top one.
    """

    def __call__(
        self, whole: Whole, width: float, client: int, round: int, generator: Generator
    ) -> Cut:
        fractions = {i: w**2 for i, w in whole.widths.items()} | {client: width**2}
        dealt = deal(fractions, client, round, self.num_regions)

        def choose(sizes: Tensor) -> Tensor:
            place = ranks(sizes)
            room = max(1, int(min(fractions[client], 1 / self.num_regions) * len(sizes)))
            return (place < room) | _inside(place, dealt, self.num_regions)

        return cut_entries(whole, width, choose)


@dataclass(frozen=True)
class ChannelRegions(_Dealt):
    """`Regions` of whole channels, ranked within their group: an adaptation of ours.

    A client of width r may keep a fraction r of the units of every group.
    """

    def __call__(
        self, whole: Whole, width: float, client: int, round: int, generator: Generator
    ) -> Cut:
        dealt = deal({**whole.widths, client: width}, client, round, self.num_regions)
        kept = {}
        for group, order in whole.by_importance.items():
            place = torch.arange(len(order))
            room = num_kept(min(width, 1 / self.num_regions), len(order))
            chosen = (place < room) | _inside(place, dealt, self.num_regions)
            kept[group] = order[chosen].sort().values
        return cut(whole.channels, kept, whole.device)


def deal(fractions: dict[int, float], client: int, round: int, num_regions: int) -> list[int]:
    """Return the regions of one client beside the share of the top region that it has room for."""
    room = {i: int(fraction * num_regions + EPSILON) for i, fraction in fractions.items()}
    others = num_regions - 1
    if not others or room[client] < 1:
        return []
    first = round + sum(max(0, room[i] - 1) for i in room if i < client)
    return [0, *(1 + (first + t) % others for t in range(room[client] - 1))]


def _inside(place: Tensor, regions: list[int], num_regions: int) -> Tensor:
    """Say which places lie in the given regions of equal size."""
    held = torch.zeros(num_regions, dtype=torch.bool)
    held[regions] = True
    return held.to(place.device)[place * num_regions // max(1, len(place))]
