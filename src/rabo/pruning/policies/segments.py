"""Named pieces of the importance order: the tool for setting C*_x by hand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Generator

from rabo.pruning.policies.policy import MaskPolicy, Whole
from rabo.pruning.submodel import Cut, cut


@dataclass(frozen=True)
class Segments(MaskPolicy):
    """Cut the importance order into equal segments; each client trains the one it is given.

    Client i trains segment `assignment[i]`, without an assignment segment i mod `num_segments`:
    with n clients every unit is then covered by n/num_segments of them. The capacity of a client
    does not matter here.
    """

    num_segments: int = 4
    assignment: Mapping[int, int] | Sequence[int] = field(default_factory=dict)
    shared = False

    def __post_init__(self) -> None:
        if self.num_segments < 1:
            raise ValueError(f"num_segments must be at least 1, got {self.num_segments}")
        for client, segment in self._assigned.items():
            if not 0 <= segment < self.num_segments:
                raise ValueError(
                    f"the segment of client {client} must lie in 0..{self.num_segments - 1}, "
                    f"got {segment}"
                )

    @property
    def _assigned(self) -> Mapping[int, int]:
        given = self.assignment
        return given if isinstance(given, Mapping) else dict(enumerate(given))

    def __call__(
        self, whole: Whole, width: float, client: int, round: int, generator: Generator
    ) -> Cut:
        segment = self._assigned.get(client, client % self.num_segments)
        kept = {}
        for group, order in whole.by_importance.items():
            if len(order) < self.num_segments:
                raise ValueError(
                    f"group {group} must have at least {self.num_segments} units to be cut into "
                    f"segments, got {len(order)}"
                )
            begin = segment * len(order) // self.num_segments
            end = (segment + 1) * len(order) // self.num_segments
            kept[group] = order[begin:end].sort().values
        return cut(whole.channels, kept, whole.device)
