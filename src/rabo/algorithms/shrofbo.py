"""SimFBO, robust to clients of unequal numbers of local steps (ShroFBO)."""

from dataclasses import dataclass

from rabo.algorithms.simfbo import SimFBO, mean_steps
from rabo.algorithms.simultaneous import Triple
from rabo.exchange.work import Local, Reply, Task, answers


@dataclass(frozen=True, kw_only=True)
class ShroFBO(SimFBO):
    """SimFBO whose clients send means in place of sums: all count the same, whatever their τ_i.

    Clients divide q_i by ‖a_i‖_1 = τ_i, and the server scales its steps by ρ = Σ p̃_i‖a_i‖_1: the
    bias that SimFBO keeps under unequal τ_i vanishes as the steps shrink. Exchanges and vectors are
    those of SimFBO.
    """

    def size_of_sums(self, clients: set[int]) -> float:
        """Return ρ, the factor from means to sums."""
        return mean_steps(self.num_local_steps, clients)

    @answers(*Triple._fields, scalars=lambda self: self.safe_numbers)
    def take_steps(self, task: Task, local: Local) -> Reply:
        """On the client: the steps of SimFBO, then q_i/τ_i."""
        reply = super().take_steps(task, local)
        sums = reply.arrays.items()
        means = {n: {k: t / task.num_steps for k, t in q.items()} for n, q in sums}
        return reply._replace(arrays=means)
