"""Simple, single-loop federated bilevel optimisation (SimFBO)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

import torch

from rabo.algorithms.simultaneous import Simultaneous
from rabo.exchange.exchanges import Exchanges
from rabo.exchange.state import Cohort, Cuts, State
from rabo.exchange.work import Runtime
from rabo.tree import Params, squared_norm


@dataclass(frozen=True, kw_only=True)
class SimFBO(Simultaneous):
    """τ_i local steps on x, y and v at once; the server steps along the sums of the slopes.

    Exchanges per round: 1 (x, y and v down; q_i, the sums of the client's slopes, up under the same
    names). The server's steps are γ = server_scale·(α, β, β): with 1 and equal τ_i it averages the
    clients' x_i, y_i and v_i. v is projected to ‖v‖ ≤ R.

    With unequal τ_i a client counts by its number of steps: a bias that smaller steps do not remove
    (see `ShroFBO`). Clients weigh the same (p_i = 1/n), and so do local steps (a_ik = 1). On
    submodels sums are averaged over the clients that hold an entry.
    """

    paper: ClassVar[str] = (
        "Yang, Xiao, Ji: SimFBO: Towards Simple, Flexible and Communication-efficient Federated "
        "Bilevel Learning, NeurIPS 2023"
    )
    kind: ClassVar[str] = "bilevel, full model"
    exchanges: ClassVar[str] = "1"
    vectors: ClassVar[str] = "x, y, v"
    second_order: ClassVar[bool] = True

    num_local_steps: int | Sequence[int] = 5  # τ, or τ_i of the clients, dealt in turn
    server_scale: float = 1.0
    radius: float = inf  # R

    def __post_init__(self) -> None:
        super().__post_init__()
        check_steps(self.num_local_steps)
        if not self.server_scale > 0:
            raise ValueError(f"server_scale must be positive, got {self.server_scale}")
        if not self.radius > 0:
            raise ValueError(f"radius must be positive, got {self.radius}")

    def round(self, state: State, cohort: Cohort, runtime: Runtime) -> State:
        cuts = Cuts(self.policy, state, cohort, self.seed)
        state = self.with_beta(state, cuts, runtime)
        ask = Exchanges(state, cuts, runtime, self.seed)
        slopes = self.gather(state, ask, lambda client: steps_of(self.num_local_steps, client))
        state = self.shorten(state, ask)
        state = self.move(state, slopes, self.server_scale * self.size_of_sums(ask.present))
        state = self.follow_curvature(state, ask)
        return replace(state, vectors={**state.vectors, "v": self._project(state.vectors["v"])})

    def size_of_sums(self, clients: set[int]) -> float:
        """Return the factor from replies to sums: replies are sums."""
        return 1.0

    def _project(self, v: Params) -> Params:
        if self.radius == inf:
            return v
        norm = squared_norm(v).sqrt()
        shrink = torch.where(norm > self.radius, self.radius / norm, 1.0)
        return {k: shrink * t for k, t in v.items()}


def check_steps(steps: int | Sequence[int]) -> None:
    """Refuse numbers of local steps below 1."""
    if not steps or min([steps] if isinstance(steps, int) else steps) < 1:
        raise ValueError(f"num_local_steps must be at least 1, got {steps}")


def steps_of(steps: int | Sequence[int], client: int) -> int:
    """Return τ_i."""
    return steps if isinstance(steps, int) else steps[client % len(steps)]


def mean_steps(steps: int | Sequence[int], clients: set[int]) -> float:
    """Return ρ = Σ p̃_i‖a_i‖_1, the factor from means to sums."""
    return sum(steps_of(steps, client) for client in clients) / max(1, len(clients))
