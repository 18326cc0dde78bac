"""FedRolex: a window of channels that moves by one a round."""

from dataclasses import dataclass, field
from typing import ClassVar

from rabo.algorithms.supervised import Supervised
from rabo.pruning.policies import MaskPolicy, Rolling


@dataclass(frozen=True, kw_only=True)
class FedRolex(Supervised):
    """Local SGD on channels {(q+t) mod n, t = 0..⌈r·n⌉−1} in round q (Alam et al., 2022)."""

    policy: MaskPolicy = field(default_factory=Rolling)

    paper: ClassVar[str] = (
        "Alam, Liu, Yan, Zhang: FedRolex: Model-Heterogeneous Federated Learning with Rolling "
        "Sub-Model Extraction, NeurIPS 2022"
    )
    own_policy: ClassVar[type | None] = Rolling
