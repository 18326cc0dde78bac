"""Local steps whose drift is corrected by a slope of all clients (FedNest's SVRG steps)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rabo.algorithms.outer import OuterLevel
from rabo.algorithms.secants import finite_secant, ratio
from rabo.algorithms.slopes import (
    FULL_BATCH,
    Slope,
    fresh_batch,
    inner_slopes,
    outer_slope_at,
    skip_batch,
)
from rabo.exchange.client import ClientContext
from rabo.exchange.covering import Covered
from rabo.exchange.exchanges import Exchanges
from rabo.exchange.request import Answer, Request
from rabo.exchange.state import CURVATURE, State
from rabo.exchange.work import Work, levels
from rabo.problems.bilevel import Batch, BilevelProblem, Level
from rabo.tree import Params, cast, lay, pieces


@dataclass(frozen=True, kw_only=True)
class CorrectedSteps(OuterLevel):
    """τ local steps of 1/τ of the step size along ∇h_i(z_i) − ∇h_i(z) + avg ∇h_j(z).

    In the first step z_i = z: the client's two slopes cancel and are not computed.
    `snapshot="full"` computes avg ∇h_j(z) on all data of the clients, local steps still on batches.
    """

    num_local_steps: int = 5  # τ on y
    num_local_steps_x: int | None = None  # τ on x; None: as many as on y
    snapshot: Literal["batch", "full"] = "batch"  # data of avg ∇h_j(z): a batch, or all

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_local_steps < 1:
            raise ValueError(f"num_local_steps must be at least 1, got {self.num_local_steps}")
        if self.num_local_steps_x is not None and self.num_local_steps_x < 1:
            raise ValueError(
                f"num_local_steps_x must be at least 1 or None, got {self.num_local_steps_x}"
            )
        if self.snapshot not in ("batch", "full"):
            raise ValueError(f"snapshot must be batch or full, got {self.snapshot!r}")

    def init(self, problem: BilevelProblem) -> State:
        if self.snapshot == "full" and getattr(problem, "whole", None) is None:
            raise ValueError(
                "snapshot='full' needs problems that draw their batches from given data "
                "(batch_size), got one that samples its own; use snapshot='batch'"
            )
        return super().init(problem)

    @property
    def snapshot_scalars(self) -> Mapping[str, float]:
        """Tell clients which data their answers see."""
        return {FULL_BATCH: 1.0} if self.snapshot == "full" else {}

    def step_inner(self, state: State, ask: Exchanges, q: Params) -> Covered:
        """One exchange: how far y moves on average, y − avg y_i."""
        scalars = {"beta": state.scalars["beta"]}
        return ask.mean(self.correct_inner, {"q": q}, scalars)["y"]

    def step_outer(self, state: State, ask: Exchanges, h: Params) -> State:
        """One exchange: x = avg x_i, or what the server's step makes of the way they went."""
        alpha = {"alpha": self.alpha_in(state)}
        return self.move_outer(state, ask.mean(self.correct_outer, {"x_h": h}, alpha)["x"])

    @cached_property
    def correct_inner(self) -> "CorrectInner":
        """τ local steps on y."""
        seen = (CURVATURE,) if self.adapts_beta else ()
        return CorrectInner(self.num_local_steps, self.adapts_beta, seen)

    @cached_property
    def correct_outer(self) -> "CorrectOuter":
        """τ local steps on x."""
        return CorrectOuter(self.num_local_steps_x or self.num_local_steps)


@dataclass(frozen=True)
class CorrectInner(Work):
    """On the client: y_i −= (β/τ)[∇_y g_i(x, y_i) − ∇_y g_i(x, y) + q], answer y − y_i.

    The drift of a step over its distance from y is a secant. With beta="auto", a client whose
    secant exceeds 1/β goes back to its first step, with its own smaller β.
    """

    num_steps: int  # τ
    adapts_beta: bool
    numbers: tuple[str, ...] = ()

    name = "correct_inner"
    takes = levels(q="y")
    answers = levels(y="y")

    def __call__(self, request: Request, client: ClientContext) -> Answer:
        y, q, beta = client.memory["y"], request.arrays["q"], request.scalars["beta"]
        steps = Steps(y, q, self.num_steps, beta, self.adapts_beta)
        found = steps.walk(request, client, "inner", partial(inner_slopes, client))
        change = {name: found.size * value for name, value in found.way.items()}
        return Answer({"y": change}, {CURVATURE: found.curvature} if self.adapts_beta else {})


@dataclass(frozen=True)
class CorrectOuter(Work):
    """On the client: x_i −= (α/τ)[∇_x f_i(x_i, y) − ∇_x f_i(x, y) + h], answer (x − x_i)/α."""

    num_steps: int  # τ

    name = "correct_outer"
    takes = levels(x_h="x")
    answers = levels(x="x")

    def __call__(self, request: Request, client: ClientContext) -> Answer:
        y = client.memory["y"]

        def slopes_on(batch: Batch) -> Slope:
            return lambda x: outer_slope_at(client, x, y, batch)

        h, alpha = request.arrays["x_h"], request.scalars["alpha"]
        steps = Steps(client.memory["x"], h, self.num_steps, alpha)
        return Answer({"x": steps.walk(request, client, "outer", slopes_on).way})


class Walk(NamedTuple):
    """Where local steps lead: to start − size·way."""

    way: dict[str, Tensor]
    size: Any
    curvature: Tensor  # the largest secant; zero without one


class Steps(NamedTuple):
    """τ steps z −= (size/τ)[∇h(z) − ∇h(start) + mean] from a start."""

    start: Params
    mean: Params
    number: int  # τ
    size: Any
    adapts_size: bool = False

    def walk(
        self,
        request: Request,
        client: ClientContext,
        level: Level,
        slopes_on: Callable[[Batch], Slope],
    ) -> Walk:
        """Take the steps; the first is along the mean.

        If all steps see the same data, the slope at the start is computed once. A single step of
        adaptive size gets a trial step, for its secant.
        """
        start, mean = lay(list(self.start.values())), lay([self.mean[name] for name in self.start])
        way, z, drift = mean / self.number, torch.empty_like(start), torch.empty_like(start)
        size = torch.as_tensor(self.size, dtype=start.dtype, device=start.device)
        at, places = self._named(z), self._named(drift)
        skip_batch(client)
        seen, slope, there, curvature = None, None, {}, start.new_zeros(())
        is_trial = self.adapts_size and self.number == 1
        for _ in range(1, self.number + is_trial):
            batch = fresh_batch(request, client, level)
            if slope is None or getattr(batch, level) is not seen:
                seen, slope = getattr(batch, level), slopes_on(batch)
                there = slope(self.start)
            torch.addcmul(start, way, size, value=-1, out=z)
            here = slope(cast(at, self.start))
            for name, place in places.items():
                torch.sub(here[name], there[name], out=place)
            if not self.adapts_size:
                way.add_(drift.add_(mean), alpha=1 / self.number)
                continue
            found = finite_secant(ratio(drift.norm(), size * way.norm(), start.norm()), size)
            curvature, back = torch.maximum(curvature, found), found * size > 1
            size = torch.where(back, 0.5 / found, size)
            if not is_trial:
                first = mean / self.number
                way = torch.where(back, first, way + drift / self.number + first)
        size = size if self.adapts_size else self.size
        return Walk(cast(self._named(way), self.start), size, curvature)

    def _named(self, flat: Tensor) -> dict[str, Tensor]:
        return pieces(flat, {name: value.shape for name, value in self.start.items()})
