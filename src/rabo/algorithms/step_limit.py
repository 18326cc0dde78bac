"""The longest step that x may take in one round."""

from collections.abc import Mapping
from math import inf
from statistics import median
from typing import Any, Literal

import torch

from rabo.tree import Params, flatten, leaves, plus

# "auto": three times the median of the last five steps, and at least a tenth of ‖x‖
NUM_REMEMBERED, TIMES, FLOOR = 5, 3.0, 0.1
LIMITED = "limited_steps"  # a number of the state: 1 if the last step on x was shortened

Limit = float | Literal["auto"] | None


def check_limit(limit: Any) -> None:
    """Refuse a limit that is neither a positive number, nor "auto", nor None."""
    if limit is None or limit == "auto":
        return
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 < limit < inf:
        raise ValueError(f"max_outer_step must be a positive number, 'auto' or None, got {limit!r}")


def limited(
    before: Params, after: Params, limit: Limit, scalars: Mapping[str, float]
) -> tuple[Params, dict[str, float]]:
    """Shorten the step from one point to another, and remember its full length.

    A client that is seldom present takes long steps among short ones: the floor lets it.
    """
    names = [f"step_length_{k}" for k in range(NUM_REMEMBERED)]
    known = [scalars[name] for name in names if name in scalars]
    way = plus(after, -1.0, before)
    length, size = torch.stack([_norm(way), _norm(before)]).tolist()
    most = inf
    if isinstance(limit, str):
        enough = len(known) == NUM_REMEMBERED
        most = max(TIMES * median(known), FLOOR * size) if enough else inf
        most = most or inf  # x = 0 has not moved yet
    elif limit is not None:
        most = limit * size or inf  # a share of zero would keep x at zero
    is_limited = length > most
    if is_limited:
        after = plus(before, most / length, way)
    known = [length, *known][:NUM_REMEMBERED]
    remembered = dict(zip(names, known, strict=False))
    return after, {**scalars, **remembered, LIMITED: float(is_limited)}


def _norm(params: Params) -> Any:
    return torch.linalg.vector_norm(flatten(leaves(params)))
