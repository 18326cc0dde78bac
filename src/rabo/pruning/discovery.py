"""Find the channels of any module that belong together.

torch-pruning follows the autograd graph and says which dimensions are coupled. What it finds is
never trusted: a compact submodel must compute what the zero-masked model computes, in float64, or
the model is refused with the name of the layer.
"""

from typing import Any

import torch
import torch_pruning
from torch import Tensor, nn
from torch_pruning import ops

from rabo.errors import UnsupportedModelError
from rabo.pruning.channels import ALWAYS, Channels
from rabo.pruning.compact import Chain, Resize, Structure, check_structure, uses_batch_statistics

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PER_CHANNEL = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.GroupNorm,
)


def find_structure(chain: Chain, example: Any) -> Structure:
    """Group the channels of a chain of modules, keep whole what cannot be cut, check the rest."""
    traced = uses_batch_statistics(chain).requires_grad_(True)
    last = _refuse_what_tracing_would_miss(traced, example)
    graph = torch_pruning.DependencyGraph().build_dependency(traced, example, verbose=False)
    found = _Finder(traced, graph, last)
    for group in graph.get_all_groups():
        found.add(group)
    structure = found.structure()
    check_structure(chain, structure, example)
    return structure


def _refuse_what_tracing_would_miss(chain: Chain, example: Any) -> nn.Module | None:
    """Find tied and unused parameters; return the layer whose output leaves the chain."""
    names: dict[int, str] = {}
    for name, parameter in chain.named_parameters(remove_duplicate=False):
        if id(parameter) in names:
            raise UnsupportedModelError(
                f"parameters {names[id(parameter)]} and {name} are tied; a submodel cannot cut "
                "them apart. Untie them, or use prune='none'."
            )
        names[id(parameter)] = name
    outputs: dict[int, nn.Module] = {}
    hooks = [
        layer.register_forward_hook(lambda m, _, out: outputs.__setitem__(id(out), m))
        for layer in chain.modules()
        if not list(layer.children()) and not isinstance(layer, nn.Identity)
    ]
    try:
        result = chain(example)
    except (RuntimeError, ValueError, TypeError) as error:
        raise UnsupportedModelError(
            f"y(x(example)) does not run ({error}). Give an example that it takes; where x and y "
            'are not applied one after the other, give example={"x": ..., "y": ...}, or one.'
        ) from error
    for hook in hooks:
        hook.remove()
    if not isinstance(result, Tensor):
        raise UnsupportedModelError(
            f"the model must return one tensor, got {type(result).__name__}; declare axes by hand."
        )
    parameters = dict(chain.named_parameters())
    slopes = torch.autograd.grad(
        result.double().square().sum(), list(parameters.values()), allow_unused=True
    )
    for name, slope in zip(parameters, slopes, strict=True):
        if slope is None:
            raise UnsupportedModelError(
                f"layer {name.rpartition('.')[0] or name}: its parameter {name} did not take part "
                "in the forward pass of the example (an untaken branch, or no_grad?). Give an "
                "example that exercises it, or declare axes by hand."
            )
    return outputs.get(id(result))


class _Finder:
    """Turns torch-pruning's groups into units, or into a reason to keep a group whole."""

    def __init__(self, chain: Chain, graph: Any, last: nn.Module | None):
        self.names = {module: name for name, module in chain.named_modules()}
        self.chain, self.graph, self.last = chain, graph, last
        self.units: dict[str, int] = {}
        self.axes: dict[str, dict[int, Tensor]] = {}
        self.whole: dict[str, str] = {}
        self.resizes: list[Resize] = []

    def add(self, group: Any) -> None:
        root = self.names.get(group[0].dep.target.module, "parameter")
        reason = self._reason_to_keep(group)
        if reason:
            self.whole[root] = reason
            return
        unit_of, num_units, resizes = self._units(group, root)
        start = sum(self.units.values())
        self.units[root] = num_units
        self.resizes += resizes
        for item in group:
            positions = torch.tensor(item.idxs)
            units = start + unit_of[torch.tensor(item.root_idxs)]
            for name, dim in self._tensors(item):
                axis = self.axes.setdefault(name, {}).setdefault(
                    dim, torch.full((self._shape(name)[dim],), ALWAYS)
                )
                axis[positions] = units

    def structure(self) -> Structure:
        shapes = {name: tuple(p.shape) for name, p in self.chain.named_parameters()}
        return Structure(Channels(self.units, self.axes, shapes, self.whole), tuple(self.resizes))

    def _shape(self, name: str) -> torch.Size:
        return self.chain.get_parameter(name).shape

    def _reason_to_keep(self, group: Any) -> str | None:
        for item in group:
            layer = item.dep.target.module
            name = self.names.get(layer, "")
            if isinstance(layer, ops._OutputOp):
                return "is the output"
            if layer is self.last and self._is_out(item):
                return f"{name} is the output"
            if isinstance(layer, (nn.LayerNorm, nn.RMSNorm)):
                return f"{name} normalises over channels: a smaller norm is not a masked norm"
            if isinstance(layer, (nn.MultiheadAttention, nn.LSTM, nn.GRU, nn.RNN)):
                return f"{name} ({type(layer).__name__}) cannot be narrowed"
            if isinstance(layer, _CONVOLUTIONS) and layer.groups > 1:
                depthwise = layer.groups == layer.in_channels == layer.out_channels
                if not depthwise:
                    return f"{name} is a grouped convolution"
        return None

    def _is_out(self, item: Any) -> bool:
        return self.graph.is_out_channel_pruning_fn(item.dep.handler)

    def _units(self, group: Any, root: str) -> tuple[Tensor, int, list[Resize]]:
        """Number the units of a group: channels, or blocks where a layer ties channels."""
        size = len(group[0].idxs)
        blocks, resizes = size, []
        for item in group:
            layer = item.dep.target.module
            if isinstance(layer, nn.GroupNorm):
                blocks = _common_blocks(blocks, layer.num_groups, size)
            if isinstance(layer, _CONVOLUTIONS) and layer.groups > 1:
                resizes.append(Resize(self.names[layer], "groups", root))
        parent_name = root.rpartition(".")[0]
        heads = getattr(self.chain.get_submodule(parent_name), "num_heads", None)
        if isinstance(heads, int) and any(_attends(item) for item in group):
            narrowest = min(len(item.idxs) for item in group)
            resizes.append(Resize(parent_name, "num_heads", root))
            # a fused query-key-value layer repeats the heads once for each of its parts
            return torch.arange(size) % narrowest // (narrowest // heads), heads, resizes
        for item in group:
            layer = item.dep.target.module
            if isinstance(layer, nn.GroupNorm):
                resizes.append(Resize(self.names[layer], "num_groups", root))
        return torch.arange(size) // (size // blocks), blocks, resizes

    def _tensors(self, item: Any) -> list[tuple[str, int]]:
        """Name the tensors and dimensions that one item of a group cuts."""
        layer = item.dep.target.module
        if isinstance(layer, nn.Parameter):
            return [(self.graph._param_to_name[layer], item.dep.target.pruning_dim % layer.dim())]
        if layer not in self.names:
            return []  # an operation, not a layer
        own = {name for name, _ in layer.named_parameters(recurse=False)}
        if isinstance(layer, nn.Embedding):
            dims = {"weight": 1}
        elif isinstance(layer, nn.PReLU):
            dims = {"weight": 0} if layer.num_parameters > 1 else {}
        elif isinstance(layer, _PER_CHANNEL):
            dims = {"weight": 0, "bias": 0}
        elif self._is_out(item) or getattr(layer, "groups", 1) > 1:
            transposed = getattr(layer, "transposed", False)
            dims = {"weight": 1 if transposed else 0, "bias": 0}
        else:
            dims = {"weight": 0 if getattr(layer, "transposed", False) else 1}
        prefix = self.names[layer]
        return [(f"{prefix}.{name}", dim) for name, dim in dims.items() if name in own]


def _attends(item: Any) -> bool:
    operation = str(item.dep.target.module)
    return any(word in operation for word in ("ScaledDotProduct", "Softmax", "Bmm"))


def _common_blocks(blocks: int, num_groups: int, size: int) -> int:
    """Return the coarser of two divisions of the same channels, which must fit each other."""
    fine, coarse = max(blocks, num_groups), min(blocks, num_groups)
    if fine % coarse:
        raise UnsupportedModelError(
            f"norm groups of {blocks} and {num_groups} over the same {size} channels do not nest"
        )
    return coarse
