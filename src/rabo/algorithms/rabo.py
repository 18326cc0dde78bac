"""Resource-adaptive distributed bilevel optimisation (Algorithm 1)."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from rabo.algorithms.base import Cohort, Cuts, State
from rabo.algorithms.exchanges import Exchanges
from rabo.algorithms.global_hessian import GlobalHessian
from rabo.algorithms.inner import InnerLevel
from rabo.algorithms.outer import OuterLevel
from rabo.hypergradients import ConjugateGradient, HypergradientEstimator
from rabo.runtimes.base import Local, Reply, Runtime, Task, answers


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

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.hypergradient, (str, type)):
            raise ValueError(
                "hypergradient must be an object such as ConjugateGradient(), got "
                f"{self.hypergradient!r}"
            )
        if self.hessian not in ("local", "global"):
            raise ValueError(f"hessian must be local or global, got {self.hessian!r}")
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
                [slope] = ask.mean(self.estimate_outer, {"y": state.y}, "x")  # lines 21-24
            state = self.move_outer(state, slope)  # lines 25-33
        return replace(state, round=state.round + 1)

    @property
    def works_together(self) -> bool:
        """Whether clients of one submodel can be asked as one where every task has its own y."""
        return self.hessian == "local" and getattr(self.hypergradient, "keeps_copies_apart", False)

    def num_exchanges(self, state: State, cohort: Cohort) -> int:
        if state.round < self.warm_up:
            return 1
        return 3 + self._implicit.num_products if self.hessian == "global" else 2

    @answers("x", scalars=("residual",))
    def estimate_outer(self, task: Task, local: Local) -> Reply:
        """Lines 22-23, on the client: the hypergradient at y_{q+1}, or at its own copies of y."""
        x, y = local.memory["x"], local.memory.get("y", task.arrays["y"])
        batch = local.draw(task, "outer")
        is_random = getattr(self.hypergradient, "is_random", False)
        generator = local.stream(task, "estimate") if is_random else None
        found = self.hypergradient(local.problem, x, y, batch, generator)
        return Reply({"x": found.value}, {"residual": found.residual})
