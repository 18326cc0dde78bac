"""OAP: regions by rank, dealt so that every parameter is trained by somebody."""

from dataclasses import dataclass, field
from typing import ClassVar

from rabo.algorithms.supervised import Supervised
from rabo.pruning.policies import ChannelRegions, MaskPolicy, Regions


@dataclass(frozen=True, kw_only=True)
class OAP(Supervised):
    """Local SGD on the top region and those dealt to the client (Zhou et al., 2023), by entries.

    Departs from the released code, which takes the order of a sort for ranks. Saves traffic, not
    work.
    """

    policy: MaskPolicy = field(default_factory=Regions)

    paper: ClassVar[str] = (
        "Zhou, Lan, Venkataramani, Ding: Every Parameter Matters: Ensuring the Convergence of "
        "Federated Learning with Dynamic Heterogeneous Models Reduction, NeurIPS 2023"
    )
    own_policy: ClassVar[type | None] = Regions


@dataclass(frozen=True, kw_only=True)
class StructuredOAP(Supervised):
    """OAP whose regions are made of whole channels: our adaptation, which saves work too."""

    policy: MaskPolicy = field(default_factory=ChannelRegions)

    paper: ClassVar[str] = "ours, after Zhou et al., NeurIPS 2023"
    own_policy: ClassVar[type | None] = ChannelRegions
