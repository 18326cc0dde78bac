"""Cut a model entry by entry: what policies without structure share."""

from collections.abc import Callable

import torch
from torch import Tensor

from rabo.pruning.policies.policy import Whole
from rabo.pruning.submodel import Cut, ElementMask, Part
from rabo.tree import Params


def weights_of(params: Params) -> dict[str, Tensor]:
    """Return what is cut: not biases and norm parameters, where there is anything else."""
    return {name: value for name, value in params.items() if value.dim() > 1} or dict(params)


def cut_entries(whole: Whole, width: float, choose: Callable[[Tensor], Tensor]) -> Cut:
    """Keep the entries that `choose` marks, given |θ| of all weights of a level.

    A level without channels to cut is kept whole, and so is everything at full width.
    """
    full = whole.everything()
    levels = {name[0] for name in whole.channels.axes} if width < 1 else set()
    return Cut(
        _masked(whole.x, choose) if "x" in levels else full.x,
        _masked(whole.y, choose) if "y" in levels else full.y,
        full.kept,
    )


def _masked(params: Params, choose: Callable[[Tensor], Tensor]) -> Part:
    weights = weights_of(params)
    chosen = choose(torch.cat([value.detach().abs().flatten() for value in weights.values()]))
    parts = chosen.split([value.numel() for value in weights.values()])
    mask = {name: torch.ones_like(value, dtype=torch.bool) for name, value in params.items()}
    for (name, value), part in zip(weights.items(), parts, strict=True):
        mask[name] = part.reshape(value.shape)
    return ElementMask(mask)


def num_entries(width: float, total: int) -> int:
    """Return width²·n, at least one: the number of entries a width stands for."""
    return max(1, round(width**2 * total))


def ranks(sizes: Tensor) -> Tensor:
    """Return the place of every entry, the largest first; ties go to the earlier entry."""
    order = sizes.argsort(descending=True, stable=True)
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)).to(order))
