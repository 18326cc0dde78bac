"""Slopes and products that clients compute in one exchange, at the x and y they received last.

A client remembers x and y until the round ends. Every answer uses a new batch, or all of the
client's data if the task has the number `full_batch`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rabo.exchange.state import CURVATURE
from rabo.exchange.work import Local, Reply, Task, answers
from rabo.hypergradients.linearisation import (
    Exact,
    View,
    check_loss,
    gradient,
    one_realisation,
)
from rabo.hypergradients.solvers import stretch
from rabo.problems.bilevel import Batch, BilevelProblem, Level
from rabo.tree import Params, as_leaves, as_tree, flatten, leaves

FULL_BATCH = "full_batch"  # a number of a task: answer on all of the client's data
Slope: TypeAlias = Callable[[Params], dict[str, Any]]
_NOTHING = nullcontext()


@answers("q")
def inner_slope(task: Task, local: Local) -> Reply:
    """Answer ∇_y g_i."""
    y = point(task, local)[1]
    return Reply({"q": inner_slopes(local, answer_batch(task, local, "inner"))(y)})


@answers("p")
def outer_slope(task: Task, local: Local) -> Reply:
    """Answer ∇_y f_i."""
    y, batch = point(task, local)[1], answer_batch(task, local)
    if sees_again(local, batch):
        return Reply({"p": as_tree(system_on(local, batch).rhs, y)})
    return Reply({"p": _outer_slope_in_y(local, y, batch)})


@answers("p", scalars=(CURVATURE,))
def hessian_product(task: Task, local: Local) -> Reply:
    """Answer ∇²_yy g_i·p, and how far it stretches p."""
    p = flatten(leaves(task.arrays["p"]))
    point(task, local)
    product = system_on(local, answer_batch(task, local)).product(p)
    return Reply({"p": as_tree(product, task.arrays["p"])}, {CURVATURE: stretch(product, p)})


@answers("x_h")
def pull_back(task: Task, local: Local) -> Reply:
    """Answer ∇_x f_i − ∇²_xy g_i·p."""
    p = flatten(leaves(task.arrays["p"]))
    point(task, local)
    return Reply({"x_h": system_on(local, answer_batch(task, local)).pull_back(p)})


def point(task: Task, local: Local) -> tuple[Params, Params]:
    """Return x and y as they came, now or in an earlier exchange of the round."""
    local.memory.update({name: task.arrays[name] for name in ("x", "y") if name in task.arrays})
    return local.memory["x"], local.memory["y"]


def answer_batch(task: Task, local: Local, level: Level | None = None) -> Batch:
    """Return all of the client's data where the task asks for them, else a fresh batch."""
    return whole_of(local) if FULL_BATCH in task.scalars else fresh_batch(task, local, level)


def fresh_batch(task: Task, local: Local, level: Level | None = None) -> Batch:
    """Draw a batch that no other answer of this round uses, if the problem draws by steps.

    With a level given, the batch may lack the other one.
    """
    number = skip_batch(local)
    return local.draw_level(task, number, level) if level else local.draw(task, number)


def skip_batch(local: Local) -> int:
    """Return the number of the next batch, and count it as used."""
    number = local.memory.get("draws", 0)
    local.memory["draws"] = number + 1
    return number


def whole_of(local: Local) -> Any:
    """Return all data of a client as one batch, or None if its problem samples batches itself."""
    return getattr(local.problem, "whole", None)


def sees_again(local: Local, batch: Batch, *levels: Level) -> bool:
    """Say whether all answers of the round use the same data: in one level, or in both."""
    return all(_data_name(local, batch, level) for level in levels or ("inner", "outer"))


def inner_slope_on(problem: BilevelProblem, x: Params, data: Any) -> Callable[..., Params]:
    """Return ∇_y g(x, ·) on some data; their features are computed once.

    The first loss is checked before anything follows from it.
    """
    with torch.no_grad():
        z = problem.features(x, data)

    def slope(y: Params, is_first: bool = False) -> Params:
        y = as_leaves(y)
        loss = problem.inner(z, y, data)
        if is_first:
            check_loss("inner", loss)
        return dict(zip(y, gradient(loss, leaves(y)), strict=True))

    return slope


def inner_slopes(local: Local, batch: Batch) -> Slope:
    """Return ∇_y g_i as a function of y; features of the same data serve the whole round."""
    problem, features = local.problem, _inner_features(local, batch)

    def slope(y: Params) -> dict[str, Any]:
        y = _trained(y)
        with _realisation(local):
            loss = problem.inner(features, y, batch.inner)
        return dict(zip(y, gradient(loss, list(y.values())), strict=True))

    return slope


def outer_slope_at(local: Local, x: Params, y: Params, batch: Batch) -> dict[str, Any]:
    """Return ∇_x f_i."""
    x = _trained(x)
    with _realisation(local):
        loss = local.problem.outer(local.problem.features(x, batch.outer), y, batch.outer)
    check_loss("outer", loss)
    return dict(zip(x, gradient(loss, list(x.values())), strict=True))


def system_on(local: Local, batch: Batch) -> Exact:
    """Return the problem linearised at the client's x and y; the same data share one graph."""
    memory = local.memory
    if not sees_again(local, batch):
        return Exact(View(local.problem, memory["x"], memory["y"], batch))
    here = (memory["x"], memory["y"], _data_name(local, batch, "inner"))
    known: tuple[Any, ...] = memory.get("linearised_at", (None,) * 3)
    if "system" in memory and all(a is b for a, b in zip(here, known, strict=True)):
        return memory["system"]
    memory.pop("system", None)  # two graphs are never held at a time
    system = Exact(View(local.problem, memory["x"], memory["y"], batch))
    memory.update(linearised_at=here, system=system)
    system.build()  # now, so that every product that follows costs the same
    return system


def minus(a: Params, b: Params, factor: Any = 1.0) -> dict[str, Any]:
    """Return a − factor·b."""
    return {name: value - factor * b[name] for name, value in a.items()}


def _data_name(local: Local, batch: Batch, level: Level) -> str:
    """Name the data that several answers share; return "" for data of one answer alone."""
    whole = whole_of(local)
    if whole is not None and getattr(batch, level) is getattr(whole, level):
        return "all"
    return "round" if local.problem.redraw == "round" else ""


def _inner_features(local: Local, batch: Batch) -> Any:
    name = f"features_{_data_name(local, batch, 'inner')}"
    if name in local.memory:
        return local.memory[name]
    with torch.no_grad(), _realisation(local):
        features = local.problem.features(local.memory["x"], batch.inner)
    if sees_again(local, batch, "inner"):
        local.memory[name] = features
    return features


def _outer_slope_in_y(local: Local, y: Params, batch: Batch) -> dict[str, Any]:
    """Return ∇_y f_i without a graph of the features, which only a slope in x needs."""
    y = _trained(y)
    with _realisation(local):
        with torch.no_grad():
            features = local.problem.features(local.memory["x"], batch.outer)
        loss = local.problem.outer(features, y, batch.outer)
    check_loss("outer", loss)
    return dict(zip(y, gradient(loss, list(y.values())), strict=True))


def _trained(params: Params) -> dict[str, Tensor]:
    """Return copies that collect gradients; they share memory with the originals."""
    return {name: value.detach().requires_grad_() for name, value in params.items()}


def _realisation(local: Local) -> AbstractContextManager[None]:
    if not getattr(local.problem, "has_random_layers", False):
        return _NOTHING
    seed = torch.default_generator.initial_seed()
    return one_realisation(local.problem, seed, local.memory["x"])
