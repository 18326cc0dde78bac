"""Dist-ProtoNet: prototypical networks, averaged over clients."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rabo.algorithms.episodic import Episodic
from rabo.algorithms.single_level import Level, Weights
from rabo.exchange.client import ClientContext
from rabo.problems.bilevel import Batch, BilevelProblem, features_of
from rabo.problems.problem import ClientProblem
from rabo.tree import Params


@dataclass(frozen=True, kw_only=True)
class DistProtoNet(Episodic):
    """Local SGD on x with −log softmax of −‖z − p_c‖², p_c the mean support features of class c.

    Tasks are classified by their prototypes too: there is no y. Departs from Snell et al. (2017)
    in the scale of features: those of a problem may have any, so distances are taken to features
    of unit size per dimension.
    """

    paper: ClassVar[str] = (
        "Snell, Swersky, Zemel: Prototypical Networks for Few-shot Learning, NeurIPS 2017"
    )
    vectors: ClassVar[str] = "x"
    needed: ClassVar[tuple[Level, ...]] = ("x",)

    @property
    def trained(self) -> tuple[Level, ...]:
        return ("x",)

    def loss(
        self, problem: BilevelProblem, at: Weights, batch: Batch, client: ClientContext
    ) -> Tensor:
        scores = _scores(problem, at["x"], batch.inner, batch.outer)
        return F.cross_entropy(scores.flatten(0, 1), batch.outer[1].flatten())

    def predict(
        self, problem: ClientProblem, x: Params, y: Params, support: Any, query: Any
    ) -> Tensor:
        return _scores(problem, x, support, query)


def _scores(problem: BilevelProblem, x: Params, support: Any, query: Any) -> Tensor:
    """Return −‖z − p_c‖² of every query and class, but for ‖z‖², which all classes share."""
    learned, asked = features_of(problem, x, (support, query))
    ways: int = problem.ways  # type: ignore[attr-defined]
    labels = torch.arange(ways, device=learned.device)
    member = (support[1].unsqueeze(2) == labels).to(learned.dtype)  # tasks, drawings, classes
    prototypes = member.mT @ learned / member.sum(dim=1).unsqueeze(2)
    scale = learned.shape[2] / learned.detach().square().sum(dim=2).mean(dim=1)
    scores = 2 * asked @ prototypes.mT - prototypes.square().sum(dim=2).unsqueeze(1)
    return scale.reshape(-1, 1, 1) * scores
