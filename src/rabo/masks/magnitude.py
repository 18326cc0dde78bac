"""The largest entries one by one, without structure."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from rabo.masks.policy import Whole
from rabo.submodel import Cut, ElementMask


@dataclass(frozen=True)
class Magnitude:
    """Keep the width² largest |θ| of x and of y: the number of entries a width stands for.

    Saves traffic, not work: tensors keep their shape, with zeros. A tensor of one dimension or less
    (a bias, a norm parameter) is kept whole, as is a level without channels to cut.
    """

    shared = True

    def __call__(
        self, whole: Whole, width: float, client: int, round: int, generator: Generator
    ) -> Cut:
        levels = {name[0] for name in whole.channels.axes}
        kept = {g: torch.arange(n) for g, n in whole.channels.units.items()}
        return Cut(
            _largest(whole.x, width if "x" in levels else 1.0),
            _largest(whole.y, width if "y" in levels else 1.0),
            kept,
        )


def _largest(params: Mapping[str, Tensor], width: float) -> ElementMask:
    if not params:
        return ElementMask({})
    weights = {name: value for name, value in params.items() if value.dim() > 1} or params
    sizes = torch.cat([value.detach().abs().flatten() for value in weights.values()])
    count = max(1, round(width**2 * len(sizes)))
    chosen = torch.zeros_like(sizes, dtype=torch.bool)
    chosen[sizes.argsort(descending=True, stable=True)[:count]] = True
    parts = chosen.split([value.numel() for value in weights.values()])
    mask = {name: torch.ones_like(value, dtype=torch.bool) for name, value in params.items()}
    for (name, value), part in zip(weights.items(), parts, strict=True):
        mask[name] = part.reshape(value.shape)
    return ElementMask(mask)
