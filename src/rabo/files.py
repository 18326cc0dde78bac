"""Trained parameters as files and modules that work without this package's training loop."""

import copy
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rabo.tree import Params


def with_statistics(module: nn.Module, params: Params, batches: Iterable[Tensor]) -> nn.Module:
    """Copy a module with given parameters and running statistics averaged over batches.

    Clients train with the statistics of their batches; those of the evaluated model are those of
    training data under its own parameters (erratum 10).
    """
    model = _with_parameters(module, params)
    for layer in _norms(model):
        _track(layer)
        layer.momentum = None  # a plain average
    model.train()
    with torch.no_grad():
        for batch in batches:
            model(batch)
    return model.eval()


def save_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """Write tensors and some text about them as safetensors: the same bytes for the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = {"about": json.dumps(dict(about), sort_keys=True)}  # several entries have no order there
    save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, path, text)


def load_model(path: str | Path, module: nn.Module) -> nn.Module:
    """Copy a module with the parameters of an exported file, ready to be used.

    Norm layers get the file's statistics where it has them, and else use those of every batch that
    they see, as in training: give them batches, not single inputs. The module must have the shape
    that was trained: that of the full model.
    """
    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder; give its x.safetensors or y.safetensors")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, or is damaged: {error}") from error
    own = dict(module.named_parameters())
    for name, value in own.items():
        if name not in tensors or tensors[name].shape != value.shape:
            found = f"shape {tuple(tensors[name].shape)}" if name in tensors else "nothing"
            raise ValueError(
                f"{path} must have {name} of shape {tuple(value.shape)}, got {found}; give the "
                "module that was trained, at its full width"
            )
    model = _with_parameters(module, tensors)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            mean = tensors.get(f"{name}.running_mean")
            if mean is None:
                layer.track_running_stats = False
                layer.running_mean = layer.running_var = layer.num_batches_tracked = None
            else:
                _track(layer)
                layer.running_mean.copy_(mean)  # pyright: ignore[reportOptionalMemberAccess]
                layer.running_var.copy_(tensors[f"{name}.running_var"])  # pyright: ignore[reportOptionalMemberAccess]
    return model.eval()


def _with_parameters(module: nn.Module, params: Params) -> nn.Module:
    model = copy.deepcopy(module)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(params[name])
    return model


def _norms(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    return [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


def _track(layer: nn.modules.batchnorm._BatchNorm) -> None:
    """Let a norm layer that used the statistics of its batch keep statistics of its own."""
    layer.track_running_stats = True
    layer.running_mean = layer.weight.new_zeros(layer.num_features)
    layer.running_var = layer.weight.new_ones(layer.num_features)
    layer.num_batches_tracked = torch.zeros((), dtype=torch.long, device=layer.weight.device)
