"""The largest entries one by one, without structure."""

from dataclasses import dataclass

from torch import Generator

from rabo.pruning.policies.entries import cut_entries, num_entries, ranks
from rabo.pruning.policies.policy import MaskPolicy, Whole
from rabo.pruning.submodel import Cut


@dataclass(frozen=True)
class Magnitude(MaskPolicy):
    """Keep the width² largest |θ| of x and of y: the number of entries a width stands for.

    Saves traffic, not work: tensors keep their shape, with zeros. A tensor of one dimension or less
    (a bias, a norm parameter) is kept whole, as is a level without channels to cut.
    """

    shared = True

    def __call__(
        self, whole: Whole, width: float, client: int, round: int, generator: Generator
    ) -> Cut:
        return cut_entries(whole, width, lambda s: ranks(s) < num_entries(width, len(s)))
