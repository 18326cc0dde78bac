"""SimFBO, robust to clients of unequal numbers of local steps (ShroFBO)."""

from dataclasses import dataclass
from typing import ClassVar

from rabo.algorithms.simfbo import SimFBO, mean_steps


@dataclass(frozen=True, kw_only=True)
class ShroFBO(SimFBO):
    """SimFBO whose clients send means in place of sums: all count the same, whatever their τ_i.

    Clients divide q_i by ‖a_i‖_1 = τ_i, and the server scales its steps by ρ = Σ p̃_i‖a_i‖_1: the
    bias that SimFBO keeps under unequal τ_i vanishes as the steps shrink. Exchanges and vectors are
    those of SimFBO.
    """

    sends_means: ClassVar[bool] = True

    def size_of_sums(self, clients: set[int]) -> float:
        """Return ρ, the factor from means to sums."""
        return mean_steps(self.num_local_steps, clients)
