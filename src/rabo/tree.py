"""Named tensors, and nested tensors as flat vectors."""

from collections.abc import Callable, Mapping, Sequence
from math import isfinite, prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

Params: TypeAlias = Mapping[str, Tensor]


def leaves(tree: Any) -> list[Tensor]:
    """Return the tensors of nested mappings, tuples and lists, in a fixed order."""
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) is dict or isinstance(tree, Mapping):  # the first is faster, and the rule
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return []
    found = []
    for item in tree:  # most are tensors, of which a call each would cost more than all else
        found += (item,) if isinstance(item, Tensor) else leaves(item)
    return found


def map_leaves(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply a function to every tensor and keep the nesting."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: map_leaves(function, tree[key]) for key in tree}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_leaves(function, item) for item in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_leaves(function, item) for item in tree)
    return tree


def replace_leaves(tree: Any, new: Sequence[Tensor]) -> Any:
    """Put other tensors into the same nesting."""
    remaining = iter(new)
    return map_leaves(lambda _: next(remaining), tree)


def as_leaves(tree: Any) -> Any:
    """Detach every tensor and let it collect gradients."""
    return map_leaves(lambda t: t.detach().requires_grad_(t.is_floating_point()), tree)


@torch.no_grad()
def plus(params: Params, factor: float | Tensor, others: Params) -> dict[str, Tensor]:
    """Return params + factor · others, which have the same names, with few kernels for all."""
    if params.keys() != others.keys():
        raise ValueError(f"names must be {list(params)}, got {list(others)}")
    if not params:
        return {}
    ways = [others[name] for name in params]
    if isinstance(factor, Tensor) and len({t.dtype for t in ways}) == 1:
        factor = factor.to(ways[0].dtype)  # else each takes the factor as it is
    lists: Any = torch  # whose operations on lists have no types
    moved = lists._foreach_add(list(params.values()), lists._foreach_mul(ways, factor))
    return dict(zip(params, moved, strict=True))


def flatten(tensors: Sequence[Tensor], num_blocks: int = 1) -> Tensor:
    """Lay tensors side by side as a matrix with one row per block."""
    return torch.cat([t.reshape(num_blocks, -1) for t in tensors], dim=1)


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Undo `flatten` for tensors of the given shapes."""
    if len(like) == 1:
        return [flat.reshape(like[0].shape).to(like[0].dtype)]
    num_blocks = flat.shape[0]
    widths = [t.numel() // num_blocks for t in like]
    parts = zip(flat.split(widths, dim=1), like, strict=True)
    return [part.reshape(t.shape).to(t.dtype) for part, t in parts]


def lay(tensors: Sequence[Tensor]) -> Tensor:
    """Lay tensors side by side as one vector; without a copy where they are pieces of one."""
    whole = block(tensors)
    if whole is not None:
        return whole
    return torch.cat([t.reshape(-1) for t in tensors]) if tensors else torch.zeros(0)


def block(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the vector whose pieces these tensors are, all of them and in this order, if any."""
    whole = tensors[0]._base if tensors else None
    if whole is None or whole.dim() != 1:
        return None
    end = whole.storage_offset()
    for t in tensors:
        if t._base is not whole or t.storage_offset() != end or not t.is_contiguous():
            return None
        end += t.numel()
    return whole if end - whole.storage_offset() == whole.numel() else None


def pieces(flat: Tensor, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Undo `lay`: named tensors that share the memory of a vector."""
    parts = flat.split([prod(shape) for shape in shapes.values()])
    return {n: part.view(shapes[n]) for n, part in zip(shapes, parts, strict=True)}


def cast(params: Params, like: Params) -> dict[str, Tensor]:
    """Give tensors the types of others; those that have them stay as they are."""
    return {name: value.to(like[name].dtype) for name, value in params.items()}


def as_tree(flat: Tensor, tree: Any) -> Any:
    """Undo `flatten` for the leaves of a tree, and keep its nesting."""
    return replace_leaves(tree, unflatten(flat, leaves(tree)))


def squared_norm(tree: Any) -> Tensor:
    """Return the sum of squares over all tensors."""
    return torch.stack([torch.linalg.vector_norm(t.detach()) for t in leaves(tree)]).square().sum()


def num_bytes(tree: Any) -> int:
    return sum(t.nbytes for t in leaves(tree))


def is_finite(tree: Any) -> bool:
    """Say whether no entry is NaN or infinite, with one pass and one read of the device."""
    extremes = [end for t in leaves(tree) if t.numel() for end in torch.aminmax(t)]
    return not extremes or all(map(isfinite, torch.stack(extremes).tolist()))


def shapes(tree: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(t.shape) for t in leaves(tree))


def only_tensors(tree: Any) -> bool:
    """Say whether nested mappings, tuples and lists hold tensors and None alone."""
    if isinstance(tree, Mapping):
        return all(map(only_tensors, tree.values()))
    if isinstance(tree, (tuple, list)):
        return all(map(only_tensors, tree))
    return tree is None or isinstance(tree, Tensor)
