"""HeteroFL: every client always trains the first channels of every layer."""

from dataclasses import dataclass, field
from typing import ClassVar

from rabo.algorithms.supervised import Supervised
from rabo.pruning.policies import MaskPolicy, Static


@dataclass(frozen=True, kw_only=True)
class HeteroFL(Supervised):
    """Local SGD on the first ⌈r·n⌉ channels, the classifier's outputs whole (Diao et al., 2021).

    Departs from HeteroFL, whose convolutional networks divide by r before each norm in training
    (Scaler). The norm undoes the division up to its eps. The released networks do not divide after
    their classifier. Four extras of the released code are options, off by default:
    `clip_gradients=1`, `weight_decay=5e-4`, `mask_logits="zero"` and `average_by_label=True`.
    """

    policy: MaskPolicy = field(default_factory=Static)

    paper: ClassVar[str] = (
        "Diao, Ding, Tarokh: HeteroFL: Computation and Communication Efficient Federated Learning "
        "for Heterogeneous Clients, ICLR 2021"
    )
    own_policy: ClassVar[type | None] = Static
