"""Norm statistics recomputed on training data, for the model that is evaluated or exported."""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rabo.tree import Params


def with_statistics(module: nn.Module, params: Params, batches: Iterable[Tensor]) -> nn.Module:
    """Copy a module with given parameters and running statistics averaged over batches.

    Clients train with the statistics of their batches; those of the evaluated model are those of
    training data under its own parameters (erratum 10).
    """
    model = copy.deepcopy(module)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(params[name])
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            device = layer.weight.device
            layer.track_running_stats, layer.momentum = True, None  # None: a plain average
            layer.running_mean = torch.zeros(layer.num_features, device=device)
            layer.running_var = torch.ones(layer.num_features, device=device)
            layer.num_batches_tracked = torch.zeros((), dtype=torch.long, device=device)
    model.train()
    with torch.no_grad():
        for batch in batches:
            functional_call(model, {}, (batch,))
    return model.eval()
