"""What clients answer in one exchange: slopes and products at the point they were last sent.

A client remembers x and y until the round ends. Every answer is computed on a batch of its own.
"""

from typing import Any

import torch

from rabo.hypergradients.linearisation import Exact, View, gradient
from rabo.problem import Batch
from rabo.runtimes.base import Local, Reply, Task
from rabo.tree import Params, as_leaves, as_tree, flatten, leaves


def inner_slope(task: Task, local: Local) -> Reply:
    """Answer ∇_y g_i."""
    y = point(task, local)[1]
    return Reply({"q": inner_slope_at(local, y, fresh_batch(task, local))})


def outer_slope(task: Task, local: Local) -> Reply:
    """Answer ∇_y f_i."""
    y = point(task, local)[1]
    return Reply({"p": as_tree(system_at(task, local).rhs, y)})


def hessian_product(task: Task, local: Local) -> Reply:
    """Answer ∇²_yy g_i·p."""
    p = task.arrays["p"]
    return Reply({"p": as_tree(system_at(task, local).product(flatten(leaves(p))), p)})


def pull_back(task: Task, local: Local) -> Reply:
    """Answer ∇_x f_i − ∇²_xy g_i·p."""
    p = flatten(leaves(task.arrays["p"]))
    return Reply({"x_h": system_at(task, local).pull_back(p)})


def point(task: Task, local: Local) -> tuple[Params, Params]:
    """Return x and y as they came, now or in an earlier exchange of the round."""
    local.memory.update({name: task.arrays[name] for name in ("x", "y") if name in task.arrays})
    return local.memory["x"], local.memory["y"]


def fresh_batch(task: Task, local: Local) -> Batch:
    """Draw a batch that no other answer of this round uses, where the problem draws by steps."""
    number = local.memory.get("draws", 0)
    local.memory["draws"] = number + 1
    return local.draw(task, number)


def inner_slope_at(local: Local, y: Params, batch: Batch) -> Params:
    """Return ∇_y g_i; features of the same data serve the whole round."""
    cache = local.cache
    if "features" not in cache or cache["data"] is not batch.inner:
        cache["data"] = batch.inner
        with torch.no_grad():
            cache["features"] = local.problem.features(local.memory["x"], batch.inner)
    y = as_leaves(y)
    loss = local.problem.inner(cache["features"], y, batch.inner)
    return dict(zip(y, gradient(loss, leaves(y)), strict=True))


def outer_slope_at(local: Local, x: Params, y: Params, batch: Batch) -> Params:
    """Return ∇_x f_i."""
    view = View(local.problem, x, y, batch)
    return dict(zip(x, view.outer_slopes(view.y)[1], strict=True))


def system_at(task: Task, local: Local) -> Exact:
    """Return the linearised problem on a fresh batch; its graph serves again for the same data."""
    cache = local.cache
    x, y = point(task, local)
    here: tuple[Any, ...] = (fresh_batch(task, local), x, y)
    known: tuple[Any, ...] = cache.get("linearised_at", ())
    if "system" not in cache or any(a is not b for a, b in zip(here, known, strict=True)):
        cache.pop("system", None)  # two graphs are never held at a time
        cache["linearised_at"] = here
        cache["system"] = Exact(View(local.problem, x, y, here[0]))
    return cache["system"]


def minus(a: Params, b: Params, factor: Any = 1.0) -> dict[str, Any]:
    """Return a − factor·b."""
    return {name: value - factor * b[name] for name, value in a.items()}
