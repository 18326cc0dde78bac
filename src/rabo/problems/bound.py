"""A module with given parameters, as losses see it."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from rabo.problems.functional import call
from rabo.tree import Params


class Bound(Mapping[str, Tensor]):
    """A module with given parameters: call it, or look a parameter up by name.

    Parameters and submodules are attributes too: `y.weight`, `y.head.weight`, `y.head(z)`.
    With several copies, parameters and inputs have a leading dimension over the copies.
    `mask`, if given, is applied to each output.
    """

    def __init__(
        self,
        module: nn.Module,
        params: Params,
        copies: int = 1,
        mask: Callable[[Tensor], Tensor] | None = None,
    ):
        self._module, self._params, self.copies, self._mask = module, params, copies, mask
        self.was_called = False

    def __call__(self, *inputs: Any) -> Any:
        self.was_called = True
        output = self._apply(*inputs)
        return output if self._mask is None else self._mask(output)

    def _apply(self, *inputs: Any) -> Any:
        if self.copies == 1:
            return call(self._module, self._params, inputs)
        if isinstance(self._module, nn.Linear) and "bias" in self._params and inputs[0].dim() == 3:
            weight, bias = self._params["weight"], self._params["bias"]
            return torch.baddbmm(bias.unsqueeze(1), inputs[0], weight.mT)  # vmap without its cost
        return vmap(lambda params, *each: functional_call(self._module, params, each))(
            dict(self._params), *inputs
        )

    def __getitem__(self, name: str) -> Tensor:
        return self._params[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)

    def parameters(self) -> Iterator[Tensor]:
        """Iterate over the given parameters."""
        return iter(self._params.values())

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the names and values of the given parameters."""
        return iter(self._params.items())

    @property
    def training(self) -> bool:
        """Whether the module is in training mode."""
        return self._module.training

    def __getattr__(self, name: str) -> Any:
        """Return a parameter, or a submodule with its share of the parameters."""
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._params:
            return self._params[name]
        child = self._module._modules.get(name)
        if child is None:
            children = (f"{key}(...)" for key in self._module._modules)
            known = ", ".join([*self._params, *children])
            raise AttributeError(
                f"{type(self._module).__name__} in a loss has no attribute {name!r}: it is the "
                "module with given parameters. Call it, or take a parameter or a submodule: "
                f"{known}. Take everything else from your own module"
            )
        prefix = f"{name}."
        own = {k.removeprefix(prefix): v for k, v in self._params.items() if k.startswith(prefix)}
        return Bound(child, own, self.copies)
