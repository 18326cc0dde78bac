"""Rounds of RABO one by one, and masks of known coverage."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from rabo.algorithms import RABO, State
from rabo.exchange.state import Cohort
from rabo.execution import InProcess
from rabo.problems.bilevel import BilevelProblem
from rabo.pruning.policies import MaskPolicy, Whole
from rabo.pruning.submodel import Cut, cut


@dataclass(frozen=True)
class Blocks(MaskPolicy):
    """Neighbouring coordinates in equal blocks, one for each client: with n clients C* = n/blocks.

    Unlike `Segments`, whose order by importance changes as x and y do, equal indices of x and y
    stay together. With `rotate`, every client takes the next block in the next round. Only the
    groups named in `cut_groups` are cut, the others are whole.
    """

    num_blocks: int
    rotate: bool = False
    cut_groups: str = "xy"
    shared = False

    def __call__(
        self, whole: Whole, width: float, client: int, round: int, generator: Generator
    ) -> Cut:
        units = whole.channels.units.items()
        kept = {group: self.held(group, n, client, round).nonzero()[:, 0] for group, n in units}
        return cut(whole.channels, kept, whole.device)

    def held(self, group: str, num_units: int, client: int, round: int) -> Tensor:
        """Say for each unit of a group whether a client trains it in a round."""
        block = torch.arange(num_units) * self.num_blocks // num_units
        own = (client + round * self.rotate) % self.num_blocks
        return (block == own) | (group not in self.cut_groups)


def states(
    algorithm: RABO, problems: Sequence[BilevelProblem], num_rounds: int, start: State | None = None
) -> Iterator[State]:
    """Yield the start and the state after each of `num_rounds` rounds, all clients taking part."""
    clients = dict(enumerate(problems))
    cohort = Cohort(problems[0].channels, dict.fromkeys(clients, 1.0))
    runtime = InProcess(clients)
    state = start or algorithm.init(problems[0])
    yield state
    for _ in range(num_rounds):
        state = algorithm.round(state, cohort, runtime)
        yield state
