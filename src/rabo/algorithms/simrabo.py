"""A single loop on dual-pruned submodels (SimRABO), and without second derivatives (SimRAFBO)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from rabo.algorithms.curvature import MEASURE_CURVATURE
from rabo.algorithms.secants import SafeSteps
from rabo.algorithms.simfbo import check_steps, mean_steps, steps_of
from rabo.algorithms.simultaneous import Simultaneous, Triple, inner_slope_of, view_at
from rabo.algorithms.slopes import minus
from rabo.exchange.client import ClientContext
from rabo.exchange.exchanges import Exchanges
from rabo.exchange.request import Answer, Request
from rabo.exchange.state import Cohort, Cuts, State
from rabo.exchange.work import Runtime, Work, Works, levels, named
from rabo.hypergradients.linearisation import LINEARISATIONS, Products, View
from rabo.hypergradients.solvers import stretch
from rabo.pruning.policies import Importance, MaskPolicy
from rabo.tree import Params, as_tree, flatten, leaves, plus, squared_norm


@dataclass(frozen=True, kw_only=True)
class SimRABO(Simultaneous):
    """One exchange a round: x, y and v move on every client's submodel, then all are averaged.

    In each of τ_i local steps a client moves x along ∇_x f_i − ∇²_xy g_i·v and v along
    ∇²_yy g_i·v − ∇_y f_i, and takes T steps on y along ∇_y g_i. Averages are over the clients that
    hold an entry. v is global and persists: it solves the mean system, without the bias of local
    inverses (erratum 6). A client sends its changes divided by τ_i, and the server scales them by
    the mean of τ_i, so clients may take unequal numbers of steps.

    Exchanges per round: 1 (x, y and v down; their changes up under the same names). With T = 1 and
    forgetting = 0 at full width this is `ShroFBO`, and with equal τ_i `SimFBO`.

    Departs from SimFBO in its defaults, because on submodels of unequal width several local steps
    fit x to one width at a time: x and v move once a round and y T times. v forgets in
    proportion to ‖Δx‖/‖x‖, the relative step of x: a v that lags behind x pulls it the wrong way.
    Nothing is forgotten once x has converged.
    """

    policy: MaskPolicy = field(default_factory=Importance)
    num_local_steps: int | Sequence[int] = 1  # τ, or τ_i of the clients, dealt in turn
    num_inner_steps: int = 5  # T, for each local step
    forgetting: float = 2.0  # v shrinks by 1/(1 + forgetting·‖Δx‖/‖x‖)

    paper: ClassVar[str] = (
        "this library: the single loop of SimFBO (Yang, Xiao, Ji, NeurIPS 2023) on the dual-pruned "
        "submodels of RABO (Li et al.)"
    )
    kind: ClassVar[str] = "bilevel, submodels"
    exchanges: ClassVar[str] = "1"
    vectors: ClassVar[str] = "x, y, v"
    second_order: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_steps(self.num_local_steps)
        if self.num_inner_steps < 1:
            raise ValueError(f"num_inner_steps must be at least 1, got {self.num_inner_steps}")
        if not self.forgetting >= 0:
            raise ValueError(f"forgetting must be at least 0, got {self.forgetting}")

    def round(self, state: State, cohort: Cohort, runtime: Runtime) -> State:
        cuts = Cuts(self.policy, state, cohort, self.seed)
        state = self.with_beta(state, cuts, runtime)
        ask = Exchanges(state, cuts, runtime, self.seed)
        vectors = {"x": state.x, "y": state.y, "v": state.vectors["v"]}
        moved = ask.mean(
            self.move_together,
            vectors,
            self.sizes(state),
            lambda client: steps_of(self.num_local_steps, client),
        )
        scale, before = mean_steps(self.num_local_steps, ask.present), state.x
        if state.round >= self.warm_up:
            state = self.move_outer(state, moved["x"], scale=scale)
        kept = self._remembered(before, state.x)
        vectors = {
            **state.vectors,
            "v": moved["v"].step({k: kept * t for k, t in vectors["v"].items()}, scale),
        }
        state = replace(state, y=moved["y"].step(state.y, scale), vectors=vectors)
        return replace(self.follow_curvature(state, ask), round=state.round + 1)

    def _remembered(self, before: Params, after: Params) -> Tensor | float:
        """Return 1/(1 + forgetting·‖Δx‖/‖x‖)."""
        if not self.forgetting:
            return 1.0
        moved = squared_norm(plus(after, -1.0, before)).sqrt()
        size = squared_norm(after).sqrt().clamp(min=torch.finfo(moved.dtype).tiny)
        return 1 / (1 + self.forgetting * moved / size)

    @cached_property
    def move_together(self) -> "MoveTogether":
        """τ_i local steps on x and v, with T steps on y each."""
        return MoveTogether(
            self.num_inner_steps, self.products, self.adapts_beta, self.safe_numbers
        )

    @cached_property
    def works(self) -> Works:
        return named(MEASURE_CURVATURE, self.move_together)


@dataclass(frozen=True, kw_only=True)
class SimRAFBO(SimRABO):
    """SimRABO whose clients take no second derivative: products are differences of ∇g."""

    second_order: ClassVar[bool] = False
    products: ClassVar[Products] = "difference"


@dataclass(frozen=True)
class MoveTogether(Work):
    """On the client: τ_i steps on x and v, with T steps on y each, then the mean of each."""

    num_inner_steps: int
    products: Products
    adapts_beta: bool
    numbers: tuple[str, ...] = ()

    name = "move_together"
    takes = levels(x="x", y="y", v="y")
    answers = levels(x="x", y="y", v="y")

    def __call__(self, request: Request, client: ClientContext) -> Answer:
        start = at = Triple.of(request)
        alpha, beta = request.scalars["alpha"], request.scalars["beta"]
        slopes = {k: torch.zeros_like(t) for k, t in at.x.items()}
        safe = SafeSteps(beta, flatten(leaves(at.y))) if self.adapts_beta else None
        steepest: Tensor | None = None
        for k in range(request.steps):
            view = view_at(client.problem, at, client.draw(request, k))
            system = LINEARISATIONS[self.products](view)
            v = flatten(leaves(at.v))
            found = system.apply(v)
            residual = found.product - system.rhs
            y = self._descend(view, system.inner_slope, beta, safe)
            if safe is None:
                v = v - beta * residual
            else:
                seen, v = stretch(found.product, v), safe.step(v, residual)
                steepest = seen if steepest is None else torch.maximum(steepest, seen)
            slopes = plus(slopes, 1.0, found.value)
            at = Triple(plus(at.x, -alpha, found.value), as_tree(y, at.y), as_tree(v, at.v))
        sums = Triple(slopes, minus(start.y, at.y), minus(start.v, at.v))._asdict()
        means = {n: {k: t / request.steps for k, t in q.items()} for n, q in sums.items()}
        return Answer(means, safe.seen(steepest) if safe else {})

    def _descend(self, view: View, slope: Tensor, beta: float, safe: SafeSteps | None) -> Tensor:
        """Take T steps on flat y with x fixed; the first slope is known."""
        slope_at, y = inner_slope_of(view), view.y
        if safe:
            safe.forget()
            if self.num_inner_steps == 1:
                safe.probe(y, slope, slope_at)
        for t in range(self.num_inner_steps):
            here = slope_at(y) if t else slope
            if safe:
                y, here, _ = safe.check(y, here)
            y = safe.step(y, here) if safe else y - beta * here
        return y
