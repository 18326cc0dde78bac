"""Federated averaging: the single-level baseline."""

from dataclasses import dataclass, field
from typing import ClassVar

from rabo.algorithms.supervised import Supervised
from rabo.pruning.policies import Full, MaskPolicy


@dataclass(frozen=True, kw_only=True)
class FedAvg(Supervised):
    """Local steps on one loss, averaged (McMahan et al., 2017); on submodels with any policy."""

    policy: MaskPolicy = field(default_factory=Full)  # as published

    paper: ClassVar[str] = (
        "McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep "
        "Networks from Decentralized Data, AISTATS 2017"
    )
    kind: ClassVar[str] = "single level, full model"
