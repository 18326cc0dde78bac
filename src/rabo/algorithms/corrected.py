"""Local steps whose drift is corrected by a slope of all clients (FedNest's SVRG steps)."""

from dataclasses import dataclass

from rabo.algorithms.base import State
from rabo.algorithms.exchanges import Exchanges
from rabo.algorithms.outer import OuterLevel
from rabo.algorithms.slopes import fresh_batch, inner_slope_at, minus, outer_slope_at
from rabo.covering import Covered
from rabo.runtimes.base import Local, Reply, Task, answers
from rabo.tree import Params


@dataclass(frozen=True, kw_only=True)
class CorrectedSteps(OuterLevel):
    """τ local steps along ∇h_i(z_i) − ∇h_i(z) + avg ∇h_j(z), together as long as one."""

    num_local_steps: int = 5  # τ

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_local_steps < 1:
            raise ValueError(f"num_local_steps must be at least 1, got {self.num_local_steps}")

    def step_inner(self, state: State, ask: Exchanges, q: Params) -> Covered:
        """One exchange: how far y moves on average, y − avg y_i."""
        scalars = {"beta": state.scalars["beta"]}
        [moved] = ask.mean(self.correct_inner, {"q": q}, "y", scalars=scalars)
        return moved

    def step_outer(self, state: State, ask: Exchanges, h: Params) -> State:
        """One exchange: x = avg x_i, or what the server's step makes of the way they went."""
        alpha = {"alpha": self.alpha_in(state)}
        [moved] = ask.mean(self.correct_outer, {"x_h": h}, "x", scalars=alpha)
        return self.move_outer(state, moved)

    @answers("y")
    def correct_inner(self, task: Task, local: Local) -> Reply:
        """On the client: y_i −= (β/τ)[∇_y g_i(x, y_i) − ∇_y g_i(x, y) + q], answer y − y_i."""
        start, q = local.memory["y"], task.arrays["q"]
        step, y = task.scalars["beta"] / self.num_local_steps, start
        for _ in range(self.num_local_steps):
            batch = fresh_batch(task, local)
            drift = minus(inner_slope_at(local, y, batch), inner_slope_at(local, start, batch))
            y = {k: v - step * (drift[k] + q[k]) for k, v in y.items()}
        return Reply({"y": minus(start, y)})

    @answers("x")
    def correct_outer(self, task: Task, local: Local) -> Reply:
        """On the client: x_i −= (α/τ)[∇_x f_i(x_i, y) − ∇_x f_i(x, y) + h], answer (x − x_i)/α."""
        start, y, h = local.memory["x"], local.memory["y"], task.arrays["x_h"]
        way = {k: v * 0 for k, v in start.items()}
        for _ in range(self.num_local_steps):
            batch, x = fresh_batch(task, local), minus(start, way, task.scalars["alpha"])
            here = outer_slope_at(local, x, y, batch)
            there = outer_slope_at(local, start, y, batch)
            way = {
                k: v + (here[k] - there[k] + h[k]) / self.num_local_steps for k, v in way.items()
            }
        return Reply({"x": way})
