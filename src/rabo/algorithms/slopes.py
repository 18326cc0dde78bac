"""Slopes and products that clients compute in one exchange, at the x and y they received last.

A client remembers x and y until the round ends. Every answer uses a new batch, or all of the
client's data if the request has the number `full_batch`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rabo.exchange.client import ClientContext
from rabo.exchange.request import Answer, Request
from rabo.exchange.state import CURVATURE
from rabo.exchange.work import Work, levels
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

FULL_BATCH = "full_batch"  # a number of a request: answer on all of the client's data
Slope: TypeAlias = Callable[[Params], dict[str, Any]]
_NOTHING = nullcontext()


@dataclass(frozen=True)
class InnerSlope(Work):
    """Answer ∇_y g_i."""

    name = "inner_slope"
    takes = levels(x="x", y="y")
    answers = levels(q="y")

    def __call__(self, request: Request, client: ClientContext) -> Answer:
        return Answer({"q": answer_inner_slope(request, client)})


@dataclass(frozen=True)
class OuterSlope(Work):
    """Answer ∇_y f_i."""

    name = "outer_slope"
    takes = levels(x="x", y="y")
    answers = levels(p="y")

    def __call__(self, request: Request, client: ClientContext) -> Answer:
        return Answer({"p": answer_outer_slope(request, client)})


@dataclass(frozen=True)
class HessianProduct(Work):
    """Answer ∇²_yy g_i·p, and how far it stretches p."""

    name = "hessian_product"
    takes = levels(x="x", y="y", p="y")
    answers = levels(p="y")
    numbers = (CURVATURE,)

    def __call__(self, request: Request, client: ClientContext) -> Answer:
        product, stretched = answer_product(request, client)
        return Answer({"p": product}, {CURVATURE: stretched})


@dataclass(frozen=True)
class PullBack(Work):
    """Answer ∇_x f_i − ∇²_xy g_i·p."""

    name = "pull_back"
    takes = levels(x="x", y="y", p="y")
    answers = levels(x_h="x")

    def __call__(self, request: Request, client: ClientContext) -> Answer:
        return Answer({"x_h": answer_pull_back(request, client)})


INNER_SLOPE, OUTER_SLOPE = InnerSlope(), OuterSlope()
HESSIAN_PRODUCT, PULL_BACK = HessianProduct(), PullBack()


def answer_inner_slope(request: Request, client: ClientContext) -> Params:
    """Return ∇_y g_i."""
    y = point(request, client)[1]
    return inner_slopes(client, answer_batch(request, client, "inner"))(y)


def answer_outer_slope(request: Request, client: ClientContext) -> Params:
    """Return ∇_y f_i."""
    y, batch = point(request, client)[1], answer_batch(request, client)
    if sees_again(client, batch):
        return as_tree(system_on(client, batch).rhs, y)
    return _outer_slope_in_y(client, y, batch)


def answer_product(request: Request, client: ClientContext) -> tuple[Params, Tensor]:
    """Return ∇²_yy g_i·p, and how far it stretches p."""
    p = flatten(leaves(request.arrays["p"]))
    point(request, client)
    product = system_on(client, answer_batch(request, client)).product(p)
    return as_tree(product, request.arrays["p"]), stretch(product, p)


def answer_pull_back(request: Request, client: ClientContext) -> Params:
    """Return ∇_x f_i − ∇²_xy g_i·p."""
    p = flatten(leaves(request.arrays["p"]))
    point(request, client)
    return system_on(client, answer_batch(request, client)).pull_back(p)


def point(request: Request, client: ClientContext) -> tuple[Params, Params]:
    """Return x and y as they came, now or in an earlier exchange of the round."""
    client.memory.update(
        {name: request.arrays[name] for name in ("x", "y") if name in request.arrays}
    )
    return client.memory["x"], client.memory["y"]


def answer_batch(request: Request, client: ClientContext, level: Level | None = None) -> Batch:
    """Return all of the client's data where the request asks for them, else a fresh batch."""
    return (
        whole_of(client) if FULL_BATCH in request.scalars else fresh_batch(request, client, level)
    )


def fresh_batch(request: Request, client: ClientContext, level: Level | None = None) -> Batch:
    """Draw a batch that no other answer of this round uses, if the problem draws by steps.

    With a level given, the batch may lack the other one.
    """
    number = skip_batch(client)
    return client.draw_level(request, number, level) if level else client.draw(request, number)


def skip_batch(client: ClientContext) -> int:
    """Return the number of the next batch, and count it as used."""
    number = client.memory.get("draws", 0)
    client.memory["draws"] = number + 1
    return number


def whole_of(client: ClientContext) -> Any:
    """Return all data of a client as one batch, or None if its problem samples batches itself."""
    return getattr(client.problem, "whole", None)


def sees_again(client: ClientContext, batch: Batch, *levels: Level) -> bool:
    """Say whether all answers of the round use the same data: in one level, or in both."""
    return all(_data_name(client, batch, level) for level in levels or ("inner", "outer"))


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


def inner_slopes(client: ClientContext, batch: Batch) -> Slope:
    """Return ∇_y g_i as a function of y; features of the same data serve the whole round."""
    problem, features = client.problem, _inner_features(client, batch)

    def slope(y: Params) -> dict[str, Any]:
        y = _trained(y)
        with _realisation(client):
            loss = problem.inner(features, y, batch.inner)
        return dict(zip(y, gradient(loss, list(y.values())), strict=True))

    return slope


def outer_slope_at(client: ClientContext, x: Params, y: Params, batch: Batch) -> dict[str, Any]:
    """Return ∇_x f_i."""
    x = _trained(x)
    with _realisation(client):
        loss = client.problem.outer(client.problem.features(x, batch.outer), y, batch.outer)
    check_loss("outer", loss)
    return dict(zip(x, gradient(loss, list(x.values())), strict=True))


def system_on(client: ClientContext, batch: Batch) -> Exact:
    """Return the problem linearised at the client's x and y; the same data share one graph."""
    x, y, cache = client.memory["x"], client.memory["y"], client.cache
    if not sees_again(client, batch):
        return Exact(View(client.problem, x, y, batch))
    here = (x, y, _data_name(client, batch, "inner"))
    known: tuple[Any, ...] = cache.get("linearised_at", (None,) * 3)
    if "system" in cache and all(a is b for a, b in zip(here, known, strict=True)):
        return cache["system"]
    cache.pop("system", None)  # two graphs are never held at a time
    system = Exact(View(client.problem, x, y, batch))
    cache.update(linearised_at=here, system=system)
    system.build()  # now, so that every product that follows costs the same
    return system


def minus(a: Params, b: Params, factor: Any = 1.0) -> dict[str, Any]:
    """Return a − factor·b."""
    return {name: value - factor * b[name] for name, value in a.items()}


def _data_name(client: ClientContext, batch: Batch, level: Level) -> str:
    """Name the data that several answers share; return "" for data of one answer alone."""
    whole = whole_of(client)
    if whole is not None and getattr(batch, level) is getattr(whole, level):
        return "all"
    return "round" if client.problem.redraw == "round" else ""


def _inner_features(client: ClientContext, batch: Batch) -> Any:
    name = f"features_{_data_name(client, batch, 'inner')}"
    if name in client.cache:
        return client.cache[name]
    with torch.no_grad(), _realisation(client):
        features = client.problem.features(client.memory["x"], batch.inner)
    if sees_again(client, batch, "inner"):
        client.cache[name] = features
    return features


def _outer_slope_in_y(client: ClientContext, y: Params, batch: Batch) -> dict[str, Any]:
    """Return ∇_y f_i without a graph of the features, which only a slope in x needs."""
    y = _trained(y)
    with _realisation(client):
        with torch.no_grad():
            features = client.problem.features(client.memory["x"], batch.outer)
        loss = client.problem.outer(features, y, batch.outer)
    check_loss("outer", loss)
    return dict(zip(y, gradient(loss, list(y.values())), strict=True))


def _trained(params: Params) -> dict[str, Tensor]:
    """Return copies that collect gradients; they share memory with the originals."""
    return {name: value.detach().requires_grad_() for name, value in params.items()}


def _realisation(client: ClientContext) -> AbstractContextManager[None]:
    if not getattr(client.problem, "has_random_layers", False):
        return _NOTHING
    seed = torch.default_generator.initial_seed()
    return one_realisation(client.problem, seed, client.memory["x"])
