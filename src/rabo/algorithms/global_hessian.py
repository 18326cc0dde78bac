"""One linear system over all clients: Σ_i ∇²_yy g_i·v = Σ_i ∇_y f_i (erratum 6)."""

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from rabo.exchange.covering import Covered
from rabo.exchange.exchanges import NO_SCALARS, Exchanges
from rabo.exchange.state import CURVATURE, State
from rabo.exchange.work import Local, Reply, Task, Work, answers
from rabo.hypergradients.linearisation import (
    Exact,
    HypergradientEstimator,
    ImplicitEstimator,
    Linearisation,
)
from rabo.hypergradients.solvers import stretch
from rabo.tree import Params, as_tree, flatten, leaves


class GlobalHessian:
    """Client and server side of a federated solve; every product is one exchange.

    Departs from line 23, where each client inverts its own Hessian: the mean of local
    hypergradients is not ∇Φ when clients differ, however small the steps. Sums, not means over the
    covering clients, keep the operator symmetric when clients hold different entries. A median is
    not linear: with it, v is what the solver makes of sums that leave the extremes out.
    """

    hypergradient: HypergradientEstimator

    def solve_globally(self, state: State, ask: Exchanges) -> Covered:
        """Return the mean of ∇_x f_i − ∇²_xy g_i·v over the clients that answer all exchanges."""

        def exchange(work: Work, name: str, vector: Params) -> Tensor:
            [total] = ask.mean(work, {name: vector}, "slope")
            return flatten(leaves(total.sum()))

        def product(p: Tensor) -> Tensor:
            return exchange(self.hessian_product, "v", as_tree(p, state.y))

        solution = self._implicit.solve(product, exchange(self.outer_slope, "y", state.y))
        found = {"residual": float(solution.residual)}
        v = as_tree(solution.v, state.y)
        [slope] = ask.mean(self.pull_back, {"v": v}, "x", scalars=found)
        return slope

    @property
    def _implicit(self) -> ImplicitEstimator:
        return cast(ImplicitEstimator, self.hypergradient)

    @answers("slope")
    def outer_slope(self, task: Task, local: Local) -> Reply:
        """On the client: linearise at y_{q+1}, answer ∇_y f_i."""
        if local.problem.copies > 1:
            raise ValueError("hessian='global' needs one y for all, got a problem with copies of y")
        local.memory["y"] = task.arrays["y"]
        return _reply(self._system(task, local).rhs, local)

    @answers("slope", scalars=(CURVATURE,))
    def hessian_product(self, task: Task, local: Local) -> Reply:
        """On the client: ∇²_yy g_i·v."""
        v = flatten(leaves(task.arrays["v"]))
        product = self._system(task, local).product(v)
        return _reply(product, local, {CURVATURE: stretch(product, v)})

    @answers("x", scalars=("residual",))
    def pull_back(self, task: Task, local: Local) -> Reply:
        """On the client: ∇_x f_i − ∇²_xy g_i·v."""
        system = self._system(task, local)
        return Reply({"x": system.pull_back(flatten(leaves(task.arrays["v"])))}, task.scalars)

    def _system(self, task: Task, local: Local) -> Linearisation:
        """Return the linearised problem; rebuilt from x and y where memory does not hold graphs."""
        if "system" not in local.memory:
            batch = local.draw(task, "outer")
            x, y = local.memory["x"], local.memory["y"]
            system = self._implicit.linearise(local.problem, x, y, batch)
            if isinstance(system, Exact):
                system.build()  # now, so that every product that follows costs the same
            local.memory["system"] = system
        return local.memory["system"]


def _reply(flat: Tensor, local: Local, scalars: Mapping[str, Any] = NO_SCALARS) -> Reply:
    return Reply({"slope": as_tree(flat, local.memory["y"])}, scalars)
