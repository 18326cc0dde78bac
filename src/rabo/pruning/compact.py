"""Modules with fewer channels, and the proof that they compute what the masked module computes."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.func import functional_call

from rabo.errors import UnsupportedModelError
from rabo.pruning.channels import ALWAYS, Channels
from rabo.pruning.submodel import cut
from rabo.tree import map_leaves

M = TypeVar("M", bound=nn.Module)
TOLERANCE = 1e-8  # relative, in float64


class Chain(nn.Module):
    """x and then y, as one module whose tensors are named "x.NAME" and "y.NAME"."""

    def __init__(self, x: nn.Module | None, y: nn.Module | None):
        super().__init__()
        self.x, self.y = x or nn.Identity(), y or nn.Identity()

    def forward(self, inputs: Any) -> Any:
        return self.y(self.x(inputs))


@dataclass(frozen=True)
class Resize:
    """An attribute that counts units and shrinks with them (conv groups, norm groups, heads)."""

    module: str
    attribute: str
    group: str


@dataclass(frozen=True)
class Structure:
    """The channels of a module and the attributes that must follow their number."""

    channels: Channels
    resizes: tuple[Resize, ...]


def uses_batch_statistics(module: M) -> M:
    """Copy a module, its batch norms without running statistics.

    Running statistics of submodels of different width do not average (HeteroFL's observation), so
    norms use those of the batch; an exported model gets its statistics from training data.
    """
    module = copy.deepcopy(module)
    for layer in module.modules():
        if isinstance(
            layer, (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
        ):
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    return module


def narrow(chain: Chain, structure: Structure, widths: Mapping[str, int]) -> Chain:
    """Copy a chain with the shapes of a submodel; its parameters hold no memory."""
    small = uses_batch_statistics(chain)
    counts = _positions(structure.channels, widths)
    for name, parameter in list(small.named_parameters()):
        shape = list(parameter.shape)
        for dim, count in counts.get(name, {}).items():
            shape[dim] = count
        owner, _, attribute = name.rpartition(".")
        empty = torch.empty(shape, dtype=parameter.dtype, device="meta")
        setattr(small.get_submodule(owner), attribute, nn.Parameter(empty))
    for resize in structure.resizes:
        if resize.group not in structure.channels.units:
            continue
        layer = small.get_submodule(resize.module)
        full, kept = structure.channels.units[resize.group], widths[resize.group]
        setattr(layer, resize.attribute, getattr(layer, resize.attribute) * kept // full)
    for layer in small.modules():
        if isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.weight is not None:
            layer.num_features = len(layer.weight)
    return small


def _positions(channels: Channels, widths: Mapping[str, int]) -> dict[str, dict[int, int]]:
    """Return the size of every cut dimension; every unit of a group has as many positions."""
    first = torch.zeros(channels.num_units + 1, dtype=torch.bool)
    for group, width in widths.items():
        first[channels.offsets[group] : channels.offsets[group] + width] = True
    first[ALWAYS] = True
    return {
        name: {dim: int(first[units].sum()) for dim, units in dims.items()}
        for name, dims in channels.axes.items()
    }


def check_structure(chain: Chain, structure: Structure, example: Any) -> None:
    """Check "compact == masked" in float64 at two widths; name the layer that breaks it."""
    units = structure.channels.units
    for fraction in (0.5, 0.25):
        if _difference(chain, structure, example, dict.fromkeys(units, fraction)) is None:
            continue
        for group in units:
            alone = dict.fromkeys(units, 1.0) | {group: fraction}
            problem = _difference(chain, structure, example, alone)
            if problem:
                raise UnsupportedModelError(
                    f"layer {group}: {problem}. Keep its channels whole, declare the axes by hand, "
                    "or rewrite the layer so that its shape follows its parameters."
                )
        problem = _difference(chain, structure, example, dict.fromkeys(units, fraction))
        raise UnsupportedModelError(f"layers {', '.join(units)} together: {problem}")


def _difference(
    chain: Chain, structure: Structure, example: Any, fractions: Mapping[str, float]
) -> str | None:
    """Say how a compact submodel differs from the masked model; None if it does not."""
    generator = torch.Generator().manual_seed(0)
    channels = structure.channels
    kept = {
        group: torch.randperm(n, generator=generator)[: max(1, int(fractions[group] * n))]
        for group, n in channels.units.items()
    }
    double = uses_batch_statistics(chain).cpu().double().eval()
    inputs = map_leaves(lambda t: t.cpu().double() if t.is_floating_point() else t.cpu(), example)
    full = {  # a head or branch that starts from zero would hide what lies before it
        name: p.detach() + (0.1 + p.detach().abs().mean()) * _noise(p.shape, generator)
        for name, p in double.named_parameters()
    }
    parts = cut(channels, kept)
    small = narrow(double, structure, {group: len(units) for group, units in kept.items()})
    masked, compact = {}, {}
    for level, part in (("x", parts.x), ("y", parts.y)):
        names = {n.removeprefix(f"{level}."): v for n, v in full.items() if n.startswith(level)}
        held = part.extract(names)
        compact |= {f"{level}.{n}": v for n, v in held.items()}
        masked |= {f"{level}.{n}": v for n, v in part.expand(held).items()}
    with torch.no_grad():
        truth = functional_call(double, masked, (inputs,))
        try:
            value = functional_call(small, compact, (inputs,))
        except (RuntimeError, ValueError, IndexError, AssertionError) as error:
            return f"its submodel does not run ({error})"
    if value.shape != truth.shape:
        return f"its submodel returns shape {tuple(value.shape)} instead of {tuple(truth.shape)}"
    error = float((value - truth).norm() / truth.norm().clamp(min=1e-300))
    return (
        None if error <= TOLERANCE else f"its submodel differs from the masked model by {error:.1e}"
    )


def _noise(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)
