"""Resource-adaptive distributed bilevel optimisation (Algorithm 1)."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from rabo.algorithms.base import Cohort, Cuts, State
from rabo.algorithms.global_hessian import GlobalHessian
from rabo.algorithms.inner import InnerLevel
from rabo.algorithms.steps import Descent, OuterStep
from rabo.hypergradients import ConjugateGradient, HypergradientEstimator
from rabo.runtimes.base import Local, Reply, Runtime, Task
from rabo.submodel import CoveredMean


@dataclass(frozen=True, kw_only=True)
class RABO(InnerLevel, GlobalHessian):
    """Resource-adaptive distributed bilevel optimisation (Algorithm 1).

    x outer, y inner; every client trains only what its masks keep.
    """

    hypergradient: HypergradientEstimator = field(default_factory=ConjugateGradient)
    hessian: Literal["local", "global"] = "local"
    alpha: float = 0.1
    outer_step: OuterStep = field(default_factory=Descent)
    warm_up: int = 0  # rounds before x moves

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.alpha > 0:
            raise ValueError(f"alpha must be positive, got {self.alpha}")
        if self.warm_up < 0:
            raise ValueError(f"warm_up must be at least 0, got {self.warm_up}")
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
        state, answered = self.train_inner(state, cuts, runtime)  # lines 6-20
        if state.round >= self.warm_up:
            slope = CoveredMean(state.x)
            for client, reply in self._hypergradients(state, cuts, answered, runtime):
                slope.add(cuts[client].x, reply.arrays["x"])  # lines 21-24
            x, memory = self.outer_step(state.x, slope, self.alpha, state.vectors)  # lines 25-33
            state = replace(state, x=x, vectors=memory)
        return replace(state, round=state.round + 1)

    def _hypergradients(
        self, state: State, cuts: Cuts, answered: set[int], runtime: Runtime
    ) -> Iterator[tuple[int, Reply]]:
        """Ask the clients that hold x_q."""
        if self.hessian == "global":
            return self.solve_globally(state, cuts, answered, runtime)
        y = cuts.extract("y", state.y)
        tasks = (
            (client, Task(self.seed, state.round, cuts[client], {"y": y(client)}))
            for client in sorted(answered)
        )
        return runtime.map(self.estimate_outer, tasks)

    def estimate_outer(self, task: Task, local: Local) -> Reply:
        """Lines 22-23, on the client: the hypergradient at y_{q+1}, or at its own copies of y."""
        x, y = local.memory["x"], local.memory.get("y", task.arrays["y"])
        batch = local.draw(task, "outer")
        is_random = getattr(self.hypergradient, "is_random", False)
        generator = local.stream(task, "estimate") if is_random else None
        found = self.hypergradient(local.problem, x, y, batch, generator)
        return Reply({"x": found.value}, {"residual": found.residual})
