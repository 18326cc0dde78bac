"""Resource-adaptive distributed bilevel optimisation (Algorithm 1)."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal

from rabo.algorithms.curvature import MEASURE_CURVATURE
from rabo.algorithms.global_hessian import GlobalSystem
from rabo.algorithms.inner import InnerLevel, InnerSteps
from rabo.algorithms.outer import OuterLevel
from rabo.algorithms.steps import Descent
from rabo.exchange.client import ClientContext
from rabo.exchange.exchanges import Exchanges
from rabo.exchange.request import Answer, Request
from rabo.exchange.state import CURVATURE, Cohort, Cuts, State
from rabo.exchange.work import Runtime, Work, Works, levels, named
from rabo.hypergradients import ConjugateGradient, HypergradientEstimator
from rabo.hypergradients.linearisation import Estimate
from rabo.hypergradients.solvers import largest
from rabo.tree import Params, plus


@dataclass(frozen=True, kw_only=True)
class RABO(InnerLevel, OuterLevel):
    """Resource-adaptive distributed bilevel optimisation (Algorithm 1).

    x outer, y inner; every client trains only what its masks keep.
    """

    paper: ClassVar[str] = (
        "Li, Zhang, Zheng, Shi, Yuan, Cheng, Yu: Distributed Bilevel Optimization with Dual "
        "Pruning for Resource-limited Clients"
    )
    kind: ClassVar[str] = "bilevel, submodels"
    exchanges: ClassVar[str] = "2 (3 + K with the global Hessian, K products)"
    vectors: ClassVar[str] = "x, y"
    second_order: ClassVar[bool] = True

    hypergradient: HypergradientEstimator = field(default_factory=ConjugateGradient)
    hessian: Literal["local", "global"] = "local"
    num_outer_steps: int = 1  # that a client takes before x is averaged

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.hypergradient, (str, type)):
            raise ValueError(
                "hypergradient must be an object such as ConjugateGradient(), got "
                f"{self.hypergradient!r}"
            )
        if self.hessian not in ("local", "global"):
            raise ValueError(f"hessian must be local or global, got {self.hessian!r}")
        if self.num_outer_steps < 1:
            raise ValueError(f"num_outer_steps must be at least 1, got {self.num_outer_steps}")
        if self.num_outer_steps > 1 and self.hessian == "global":
            raise ValueError(
                "hessian='global' needs all clients for every step on x, got num_outer_steps = "
                f"{self.num_outer_steps}; use hessian='local'"
            )
        if self.num_outer_steps > 1 and not isinstance(self.outer_step, Descent):
            raise ValueError(
                f"num_outer_steps = {self.num_outer_steps} are plain steps on the client, whose "
                f"length {type(self.outer_step).__name__} on the server would not see; use "
                "outer_step='descent', or one outer step"
            )
        if self.hessian == "global" and self.hypergradient.system is None:
            raise ValueError(
                "hessian='global' solves one linear system over all clients and needs an estimator "
                "that does (conjugate-gradient, neumann, directional-difference), got "
                f"{type(self.hypergradient).__name__}"
            )

    def round(self, state: State, cohort: Cohort, runtime: Runtime) -> State:
        """One global iteration q (Algorithm 1, lines 3-33)."""
        cuts = Cuts(self.policy, state, cohort, self.seed)  # lines 4-5
        state = self.with_beta(state, cuts, runtime)
        ask = Exchanges(state, cuts, runtime, self.seed)
        state = self.train_inner(state, ask)  # lines 6-20
        if state.round >= self.warm_up:
            if self.hessian == "global":
                slope = self.global_system.solve(state, ask)
            else:
                rates = self._rates(state)
                slope = ask.mean(self.estimate_outer, {"y": state.y}, rates)["x"]  # 21-24
            state = self.move_outer(state, slope)  # lines 25-33
        return replace(self.follow_curvature(state, ask), round=state.round + 1)

    @cached_property
    def works(self) -> Works:
        if self.hessian == "global":
            outer: tuple[Work, ...] = self.global_system.works
        else:
            outer = (self.estimate_outer,)
        return named(MEASURE_CURVATURE, self.update_inner, *outer)

    @cached_property
    def global_system(self) -> GlobalSystem:
        """The linear system over all clients, with hessian="global"."""
        if self.hypergradient.system is None:
            raise ValueError(f"{type(self.hypergradient).__name__} solves no linear system")
        return GlobalSystem(self.hypergradient.system)

    @cached_property
    def estimate_outer(self) -> "EstimateOuter":
        """Lines 22-23, on the client."""
        seen = (CURVATURE,) if self.adapts_beta else ()
        return EstimateOuter(
            self.hypergradient,
            self.num_outer_steps,
            self.inner_steps,
            self.separable,
            ("residual", *seen),
        )

    @property
    def separable(self) -> bool:
        same_x = self.hessian == "local" and self.num_outer_steps == 1
        return same_x and self.hypergradient.keeps_copies_apart

    @property
    def uses_local_hessians(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.hessian == "local"

    def _rates(self, state: State) -> dict[str, float]:
        """Return the step sizes that clients need to move x themselves."""
        if self.num_outer_steps == 1:
            return {}
        return {"alpha": self.alpha_in(state), "beta": state.scalars["beta"]}


@dataclass(frozen=True)
class EstimateOuter(Work):
    """Lines 22-23, on the client: the hypergradient at y_{q+1}, or at its own copies of y.

    Goes beyond the paper with more than one outer step: x moves along it, y follows by T steps,
    and the sum of the hypergradients on the way is sent.
    """

    hypergradient: HypergradientEstimator
    num_steps: int
    inner_steps: InnerSteps
    separable: bool = False
    numbers: tuple[str, ...] = ()

    name = "estimate_outer"
    takes = levels(y="y")
    answers = levels(x="x")

    def __call__(self, request: Request, client: ClientContext) -> Answer:
        x, y = client.memory["x"], client.memory.get("y", request.arrays["y"])
        found = self._estimate(request, client, x, y, "")
        total, seen = found.value, [found.curvature]
        for k in range(1, self.num_steps):
            x = plus(x, -request.scalars["alpha"], found.value)
            y, numbers = self.inner_steps.take(
                request, client, x, y, lambda t, k=k: f"{t} after {k}"
            )
            found = self._estimate(request, client, x, y, f" after {k}")
            total = plus(total, 1.0, found.value)
            seen += [found.curvature, numbers.get(CURVATURE)]
        scalars = {"residual": found.residual}
        if CURVATURE in self.numbers:
            scalars[CURVATURE] = largest([c for c in seen if c is not None], found.residual)
        return Answer({"x": total}, scalars)

    def _estimate(
        self, request: Request, client: ClientContext, x: Params, y: Params, when: str
    ) -> Estimate:
        batch = client.draw(request, f"outer{when}")
        is_random = self.hypergradient.is_random
        generator = client.stream(request, f"estimate{when}") if is_random else None
        return self.hypergradient(client.problem, x, y, batch, generator)
