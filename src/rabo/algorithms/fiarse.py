"""FIARSE: the mask is a function of the weights, and gradients know it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from rabo.algorithms.single_level import Weights
from rabo.algorithms.supervised import Supervised
from rabo.exchange.client import ClientContext
from rabo.exchange.request import Request
from rabo.pruning.channels import ALWAYS, Channels
from rabo.pruning.policies import Importance, MaskPolicy, Threshold
from rabo.pruning.policies.entries import weights_of
from rabo.pruning.submodel import ElementMask
from rabo.tree import Params


@dataclass(frozen=True, kw_only=True)
class FIARSE(Supervised):
    """Local SGD through w ⊙ 1[|w| ≥ θ], θ the k-th largest |w| (Wu et al., 2024), by entries.

    θ is fixed for the round and the mask re-evaluated at each forward pass. The gradient of a kept
    weight has the factor 1 + 2θ|w|/(|w|+θ)², which the released code means but never reaches. Saves
    traffic, not work.
    """

    policy: MaskPolicy = field(default_factory=Threshold)

    paper: ClassVar[str] = (
        "Wu, Wang, Wang, Liu, Su, Gao: FIARSE: Model-Heterogeneous Federated Learning via "
        "Importance-Aware Submodel Extraction, NeurIPS 2024"
    )
    own_policy: ClassVar[type | None] = Threshold

    def masking(self, request: Request, client: ClientContext) -> Callable[[Weights], Weights]:
        thetas = {}
        for level in self.trained:
            part = request.submodel.of(level)
            if isinstance(part, ElementMask):  # else nothing is cut
                thetas[level] = _smallest(weights_of(request.arrays[level]), part.mask)

        def mask(weights: Weights) -> Weights:
            masked = dict(weights)
            for level, theta in thetas.items():
                cut = weights_of(request.arrays[level])  # names, before copies add a dimension
                kept = {k: w * gate(w.abs(), theta) for k, w in weights[level].items() if k in cut}
                masked[level] = {**weights[level], **kept}
            return masked

        return mask


@dataclass(frozen=True, kw_only=True)
class StructuredFIARSE(Supervised):
    """FIARSE whose masks keep channels by the norm s of all their weights: our adaptation.

    Local SGD through w ⊙ 1[s ≥ θ], θ the smallest norm kept of a group when the round starts; the
    gradient is that of w·m(s) with the same slope of m. Saves work too.
    """

    policy: MaskPolicy = field(default_factory=Importance)

    paper: ClassVar[str] = "ours, after Wu et al., NeurIPS 2024"
    own_policy: ClassVar[type | None] = Importance

    def masking(self, request: Request, client: ClientContext) -> Callable[[Weights], Weights]:
        channels, start = client.problem.channels, request.arrays
        widths = {g: n for g, n in request.submodel.widths if n < channels.units[g]}
        if not widths:  # nothing is cut
            return lambda weights: weights
        device = next(iter(start["x"].values())).device
        units = _narrowed(channels, request.submodel.widths, device)
        theta = _smallest_kept(units, _norms(units, start["x"], start["y"]), widths)
        copies = client.problem.copies

        def mask(weights: Weights) -> Weights:
            y = weights["y"]
            mean = y if copies == 1 else {k: v.mean(dim=0) for k, v in y.items()}
            scores = gate(_norms(units, weights["x"], mean), theta)
            gates = torch.cat([scores, scores.new_ones(1)])  # the last is of what is always kept
            masked: Any = {level: dict(params) for level, params in weights.items()}
            for name, dims in units.axes.items():
                level, _, key = name.partition(".")
                if level not in self.trained:
                    continue
                for dim, unit in dims.items():
                    shape = [-1 if d == dim else 1 for d in range(len(channels.shapes[name]))]
                    tensor = masked[level][key]
                    masked[level][key] = tensor * gates[unit].reshape(shape).to(tensor.dtype)
            return masked

        return mask


def gate(size: Tensor, theta: Tensor) -> Tensor:
    """Return 1[s ≥ θ] with the slope of (s − θ)/(s + θ), 2θ/(s + θ)², where it is one."""
    soft = (size - theta) / (size + theta).clamp(min=torch.finfo(size.dtype).tiny)
    return (size >= theta) * (1 + (soft - soft.detach()))


def _smallest(weights: Params, held: Mapping[str, Tensor]) -> Tensor:
    """Return θ: the smallest |w| that is held."""
    each = [w.abs().masked_fill(~held[name], torch.inf).amin() for name, w in weights.items()]
    return torch.stack(each).amin()


@lru_cache(maxsize=64)
def _narrowed(
    channels: Channels, widths: tuple[tuple[str, int], ...], device: torch.device
) -> Channels:
    """Return the unit of every position of the smaller tensors, as if the first units were kept.

    Which units were kept does not matter, only that tensors agree on them.
    """
    first = torch.zeros(channels.num_units + 1, dtype=torch.bool)
    for group, width in widths:
        first[channels.offsets[group] : channels.offsets[group] + width] = True
    first[ALWAYS] = True
    axes = {
        name: {dim: units[first[units]].to(device) for dim, units in dims.items()}
        for name, dims in channels.axes.items()
    }
    return replace(channels, axes=axes)


def _norms(units: Channels, x: Params, y: Params) -> Tensor:
    # the bound keeps the slope finite where a unit is zero
    return units.importance(x, y).clamp(min=1e-30).sqrt()


def _smallest_kept(units: Channels, norms: Tensor, widths: Mapping[str, int]) -> Tensor:
    """Return θ for every unit: the smallest norm of its group; zero where a group is whole."""
    theta = torch.zeros_like(norms)
    for group, width in widths.items():
        start = units.offsets[group]
        theta[start : start + units.units[group]] = norms[start : start + width].amin()
    return theta
