"""All entries that are as large as a threshold (FIARSE)."""

from dataclasses import dataclass

from torch import Generator

from rabo.pruning.policies.entries import cut_entries, num_entries
from rabo.pruning.policies.policy import MaskPolicy, Whole
from rabo.pruning.submodel import Cut


@dataclass(frozen=True)
class Threshold(MaskPolicy):
    """Keep |w| ≥ θ, the k-th largest |w| of a level with k = width²·n (Wu et al., 2024).

    Entries that tie with the k-th are all kept. Departs from FIARSE, whose one θ spans the whole
    model, where the model has two levels: a head that starts from zero would never pass the θ of
    its backbone.
    """

    shared = True

    def __call__(
        self, whole: Whole, width: float, client: int, round: int, generator: Generator
    ) -> Cut:
        return cut_entries(
            whole, width, lambda s: s >= s.topk(num_entries(width, len(s))).values[-1]
        )
