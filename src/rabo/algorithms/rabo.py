"""Resource-adaptive distributed bilevel optimisation (Algorithm 1)."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from rabo.algorithms.global_hessian import GlobalHessian
from rabo.algorithms.inner import InnerLevel
from rabo.algorithms.outer import OuterLevel
from rabo.algorithms.steps import Descent
from rabo.exchange.exchanges import Exchanges
from rabo.exchange.state import CURVATURE, Cohort, Cuts, State
from rabo.exchange.work import Local, Reply, Runtime, Task, answers
from rabo.hypergradients import ConjugateGradient, HypergradientEstimator
from rabo.hypergradients.linearisation import Estimate
from rabo.hypergradients.solvers import largest
from rabo.tree import Params, plus


@dataclass(frozen=True, kw_only=True)
class RABO(InnerLevel, OuterLevel, GlobalHessian):
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
        if self.hessian == "global" and not hasattr(self.hypergradient, "linearise"):
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
                slope = self.solve_globally(state, ask)
            else:
                rates = self._rates(state)
                [slope] = ask.mean(self.estimate_outer, {"y": state.y}, "x", scalars=rates)  # 21-24
            state = self.move_outer(state, slope)  # lines 25-33
        return replace(self.follow_curvature(state, ask), round=state.round + 1)

    @property
    def works_together(self) -> bool:
        """Whether clients of one submodel can be asked as one where every task has its own y."""
        same_x = self.hessian == "local" and self.num_outer_steps == 1
        return same_x and getattr(self.hypergradient, "keeps_copies_apart", False)

    @property
    def uses_local_hessians(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.hessian == "local"

    def _rates(self, state: State) -> dict[str, float]:
        """Return the step sizes that clients need to move x themselves."""
        if self.num_outer_steps == 1:
            return {}
        return {"alpha": self.alpha_in(state), "beta": state.scalars["beta"]}

    @answers("x", scalars=lambda self: ("residual", *((CURVATURE,) if self.adapts_beta else ())))
    def estimate_outer(self, task: Task, local: Local) -> Reply:
        """Lines 22-23, on the client: the hypergradient at y_{q+1}, or at its own copies of y.

        Goes beyond the paper with more than one outer step: x moves along it, y follows by T steps,
        and the sum of the hypergradients on the way is sent.
        """
        x, y = local.memory["x"], local.memory.get("y", task.arrays["y"])
        found = self._hypergradient(task, local, x, y, "")
        total, seen = found.value, [found.curvature]
        for k in range(1, self.num_outer_steps):
            x = plus(x, -task.scalars["alpha"], found.value)
            y, numbers = self.follow(task, local, x, y, lambda t, k=k: f"{t} after {k}")
            found = self._hypergradient(task, local, x, y, f" after {k}")
            total = plus(total, 1.0, found.value)
            seen += [found.curvature, numbers.get(CURVATURE)]
        scalars = {"residual": found.residual}
        if self.adapts_beta:
            scalars[CURVATURE] = largest([c for c in seen if c is not None], found.residual)
        return Reply({"x": total}, scalars)

    def _hypergradient(self, task: Task, local: Local, x: Params, y: Params, when: str) -> Estimate:
        batch = local.draw(task, f"outer{when}")
        is_random = getattr(self.hypergradient, "is_random", False)
        generator = local.stream(task, f"estimate{when}") if is_random else None
        return self.hypergradient(local.problem, x, y, batch, generator)
