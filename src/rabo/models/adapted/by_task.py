"""Functions whose arguments and results have a leading dimension over tasks."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function


class ByTask(Function):
    """Joins the dimension that vmap adds to the one over tasks, and parts them again."""

    @classmethod
    def vmap(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, info: Any, in_dims: Sequence[int | None], *given: Any
    ) -> Any:
        found = cls.apply(
            *(_joined(g, d, info.batch_size) for g, d in zip(given, in_dims, strict=True))
        )
        if isinstance(found, Tensor):
            return found.unflatten(0, (info.batch_size, -1)), 0
        return tuple(f.unflatten(0, (info.batch_size, -1)) for f in found), (0,) * len(found)


def _joined(given: Any, dim: int | None, number: int) -> Any:
    """Let one leading dimension run over what is mapped and over tasks."""
    if not isinstance(given, Tensor):
        return given
    each = given.expand(number, *given.shape) if dim is None else given.movedim(dim, 0)
    return each.flatten(0, 1)
