"""One linear system over all clients: Σ_i ∇²_yy g_i·v = Σ_i ∇_y f_i (erratum 6)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from rabo.exchange.client import ClientContext
from rabo.exchange.covering import Covered
from rabo.exchange.exchanges import NO_SCALARS, Exchanges
from rabo.exchange.request import Answer, Request
from rabo.exchange.state import CURVATURE, State
from rabo.exchange.work import Work, levels
from rabo.hypergradients.linearisation import (
    Exact,
    ImplicitSystem,
    Linearisation,
)
from rabo.hypergradients.solvers import stretch
from rabo.tree import Params, as_tree, flatten, leaves


@dataclass(frozen=True)
class GlobalSystem:
    """Client and server side of a federated solve; every product is one exchange.

    Departs from line 23, where each client inverts its own Hessian: the mean of local
    hypergradients is not ∇Φ when clients differ, however small the steps. Sums, not means over the
    covering clients, keep the operator symmetric when clients hold different entries. A median is
    not linear: with it, v is what the solver makes of sums that leave the extremes out.
    """

    system: ImplicitSystem

    @cached_property
    def works(self) -> tuple[Work, Work, Work]:
        """The right-hand side, a product and the way back to x, on the client."""
        return OuterSlope(self.system), HessianProduct(self.system), PullBack(self.system)

    def solve(self, state: State, ask: Exchanges) -> Covered:
        """Return the mean of ∇_x f_i − ∇²_xy g_i·v over the clients that answer all exchanges."""
        outer_slope, hessian_product, pull_back = self.works

        def exchange(work: Work, name: str, vector: Params) -> Tensor:
            total = ask.mean(work, {name: vector})["slope"]
            return flatten(leaves(total.sum()))

        def product(p: Tensor) -> Tensor:
            return exchange(hessian_product, "v", as_tree(p, state.y))

        solution = self.system.solve(product, exchange(outer_slope, "y", state.y))
        found = {"residual": float(solution.residual)}
        return ask.mean(pull_back, {"v": as_tree(solution.v, state.y)}, found)["x"]


@dataclass(frozen=True)
class OuterSlope(Work):
    """On the client: linearise at y_{q+1}, answer ∇_y f_i."""

    system: ImplicitSystem

    name = "outer_slope"
    takes = levels(y="y")
    answers = levels(slope="y")

    def __call__(self, request: Request, client: ClientContext) -> Answer:
        if client.problem.copies > 1:
            raise ValueError("hessian='global' needs one y for all, got a problem with copies of y")
        client.memory["y"] = request.arrays["y"]
        return _answer(_linearised(self.system, request, client).rhs, client)


@dataclass(frozen=True)
class HessianProduct(Work):
    """On the client: ∇²_yy g_i·v."""

    system: ImplicitSystem

    name = "hessian_product"
    takes = levels(v="y")
    answers = levels(slope="y")
    numbers = (CURVATURE,)

    def __call__(self, request: Request, client: ClientContext) -> Answer:
        v = flatten(leaves(request.arrays["v"]))
        product = _linearised(self.system, request, client).product(v)
        return _answer(product, client, {CURVATURE: stretch(product, v)})


@dataclass(frozen=True)
class PullBack(Work):
    """On the client: ∇_x f_i − ∇²_xy g_i·v."""

    system: ImplicitSystem

    name = "pull_back"
    takes = levels(v="y")
    answers = levels(x="x")
    numbers = ("residual",)

    def __call__(self, request: Request, client: ClientContext) -> Answer:
        v = flatten(leaves(request.arrays["v"]))
        return Answer(
            {"x": _linearised(self.system, request, client).pull_back(v)}, request.scalars
        )


def _linearised(system: ImplicitSystem, request: Request, client: ClientContext) -> Linearisation:
    """Return the linearised problem; rebuilt from x and y where the cache was dropped."""
    if "system" not in client.cache:
        batch = client.draw(request, "outer")
        x, y = client.memory["x"], client.memory["y"]
        linearised = system.linearise(client.problem, x, y, batch)
        if isinstance(linearised, Exact):
            linearised.build()  # now, so that every product that follows costs the same
        client.cache["system"] = linearised
    return client.cache["system"]


def _answer(flat: Tensor, client: ClientContext, scalars: Mapping[str, Any] = NO_SCALARS) -> Answer:
    return Answer({"slope": as_tree(flat, client.memory["y"])}, scalars)
