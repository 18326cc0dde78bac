"""Call a module with given parameters: `torch.func.functional_call` at less cost."""

from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call


class _Slot(NamedTuple):
    """One place of a module tree that holds a parameter; tied parameters have several."""

    owner: dict[str, Any]  # of the layer, by attribute
    attribute: str
    name: str


_PLACES: "WeakKeyDictionary[nn.Module, tuple[list[_Slot], set[str]]]" = WeakKeyDictionary()


def call(module: nn.Module, params: Mapping[str, Tensor], inputs: tuple[Any, ...]) -> Any:
    """Return module(*inputs) with all its parameters replaced for this call.

    torch walks the whole module tree at every call to find tied parameters; here the places of the
    parameters are found once. They must not change afterwards.
    """
    places = _PLACES.get(module)
    if places is None:
        slots = _slots_of(module)
        places = _PLACES[module] = slots, {slot.name for slot in slots}
    slots, names = places
    if params.keys() != names:
        return functional_call(module, dict(params), inputs)
    before = [owner[attribute] for owner, attribute, _ in slots]
    try:
        for owner, attribute, name in slots:
            owner[attribute] = params[name]
        return module(*inputs)
    finally:
        for (owner, attribute, _), value in zip(slots, before, strict=True):
            owner[attribute] = value


def _slots_of(module: nn.Module) -> list[_Slot]:
    """Return the places of all parameters; none where only torch can replace them."""
    if isinstance(module, (torch.jit.ScriptModule, nn.DataParallel)):
        return []
    names = {id(value): name for name, value in module.named_parameters()}
    return [
        _Slot(layer._parameters, attribute, names[id(value)])
        for layer in module.modules()
        for attribute, value in layer._parameters.items()
        if value is not None
    ]
