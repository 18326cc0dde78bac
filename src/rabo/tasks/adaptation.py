"""Fit heads to support sets, and say how well they do."""

from typing import Any

import torch
from torch import Tensor

from rabo.exchange.state import spread
from rabo.hypergradients.curvature import lanczos
from rabo.hypergradients.linearisation import gradient
from rabo.problems.problem import ClientProblem
from rabo.tree import Params, as_leaves, flatten, leaves, unflatten


def adapt_heads(problem: ClientProblem, z: Tensor, y: Params, data: Any, num_steps: int) -> Params:
    """Take gradient steps of size 1/l_{g,1} from y, with x frozen, for all tasks at once."""
    heads = as_leaves(spread(y, problem.copies))
    step = 1 / _curvature(problem, z, heads, data)
    for _ in range(num_steps):
        heads = as_leaves(heads)
        slopes = gradient(problem.inner(z, heads, data), leaves(heads))
        heads = {k: v.detach() - step * s for (k, v), s in zip(heads.items(), slopes, strict=True)}
    return heads


def _curvature(problem: ClientProblem, z: Tensor, heads: Params, data: Any) -> Tensor:
    inputs = leaves(heads)
    slopes = gradient(problem.inner(z, heads, data), inputs, create_graph=True)

    def product(p: Tensor) -> Tensor:
        parts = unflatten(p, inputs)
        return flatten(
            list(
                torch.autograd.grad(
                    slopes,
                    inputs,
                    parts,
                    retain_graph=True,
                    materialize_grads=True,
                    allow_unused=True,
                )
            )
        )

    return lanczos(product, flatten(slopes).detach(), 5).largest.to(z.dtype)


def accuracy_interval(accuracies: Tensor) -> tuple[float, float]:
    """Return the mean over tasks and the half width of its 95 % interval."""
    spread_of_mean = accuracies.std() / len(accuracies) ** 0.5 if len(accuracies) > 1 else 0.0
    return float(accuracies.mean()), float(1.96 * spread_of_mean)
