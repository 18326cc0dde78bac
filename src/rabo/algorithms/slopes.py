"""What clients answer in one exchange: slopes and products at the point they were last sent.

A client remembers x and y until the round ends. Every answer is computed on a batch of its own.
"""

from typing import Any

import torch

from rabo.bilevel import Batch
from rabo.hypergradients.linearisation import Exact, View, gradient, one_realisation
from rabo.runtimes.base import Local, Reply, Task, answers
from rabo.tree import Params, as_leaves, as_tree, flatten, leaves


@answers("q")
def inner_slope(task: Task, local: Local) -> Reply:
    """Answer ∇_y g_i."""
    y = point(task, local)[1]
    return Reply({"q": inner_slope_at(local, y, fresh_batch(task, local))})


@answers("p")
def outer_slope(task: Task, local: Local) -> Reply:
    """Answer ∇_y f_i."""
    y = point(task, local)[1]
    return Reply({"p": as_tree(system_at(task, local).rhs, y)})


@answers("p")
def hessian_product(task: Task, local: Local) -> Reply:
    """Answer ∇²_yy g_i·p."""
    p = task.arrays["p"]
    return Reply({"p": as_tree(system_at(task, local).product(flatten(leaves(p))), p)})


@answers("x_h")
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


def sees_again(local: Local, batch: Batch) -> bool:
    """Say whether all answers of the round are computed on this batch."""
    return local.problem.redraw == "round" or batch is getattr(local.problem, "data", None)


def inner_slope_at(local: Local, y: Params, batch: Batch) -> Params:
    """Return ∇_y g_i; features of the same data serve the whole round."""
    features = local.memory.get("features")
    with one_realisation(local.problem, torch.default_generator.initial_seed()):
        if features is None:
            with torch.no_grad():
                features = local.problem.features(local.memory["x"], batch.inner)
            if sees_again(local, batch):
                local.memory["features"] = features
        y = as_leaves(y)
        loss = local.problem.inner(features, y, batch.inner)
    return dict(zip(y, gradient(loss, leaves(y)), strict=True))


def outer_slope_at(local: Local, x: Params, y: Params, batch: Batch) -> Params:
    """Return ∇_x f_i."""
    view = View(local.problem, x, y, batch)
    return dict(zip(x, view.outer_slopes(view.y)[1], strict=True))


def system_at(task: Task, local: Local) -> Exact:
    """Return the linearised problem on a fresh batch; its graph serves again for the same data."""
    memory, batch = local.memory, fresh_batch(task, local)
    x, y = point(task, local)
    here: tuple[Any, ...] = (x, y)
    known: tuple[Any, ...] = memory.get("linearised_at", (None, None))
    again = sees_again(local, batch)
    if "system" in memory and again and all(a is b for a, b in zip(here, known, strict=True)):
        return memory["system"]
    memory.pop("system", None)  # two graphs are never held at a time
    system = Exact(View(local.problem, x, y, batch))
    if again:
        memory.update(linearised_at=here, system=system)
        system.build()  # now, so that every product that follows costs the same
    return system


def minus(a: Params, b: Params, factor: Any = 1.0) -> dict[str, Any]:
    """Return a − factor·b."""
    return {name: value - factor * b[name] for name, value in a.items()}
