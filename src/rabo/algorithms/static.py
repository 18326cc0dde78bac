"""HeteroFL: every client always trains the first channels of every layer."""

from dataclasses import dataclass, field
from typing import ClassVar

from rabo.algorithms.supervised import Supervised
from rabo.masks import MaskPolicy, Static


@dataclass(frozen=True, kw_only=True)
class HeteroFL(Supervised):
    """Local SGD on the first ⌈r·n⌉ channels, the classifier's outputs whole (Diao et al., 2021).

    Departs from HeteroFL, whose training divides by r after every layer with parameters: the
    batch-statistics norms that follow undo it, except after the last linear layer.
    """

    policy: MaskPolicy = field(default_factory=Static)

    paper: ClassVar[str] = (
        "Diao, Ding, Tarokh: HeteroFL: Computation and Communication Efficient Federated Learning "
        "for Heterogeneous Clients, ICLR 2021"
    )
    own_policy: ClassVar[type | None] = Static
