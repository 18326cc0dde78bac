"""Hyper-representation on scikit-learn's handwritten digits: needs no download.

x is the hidden layers of a perceptron, y its classifier; y is fitted to training data with a weight
penalty, x so that this y does well on validation data.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rabo.algorithms import SINGLE_LEVEL, State
from rabo.errors import needs
from rabo.exchange.budgets import Resources
from rabo.federation.clients import Client
from rabo.federation.ledger import Ledger
from rabo.problems.problem import Problem
from rabo.seeding import seed_of, stream
from rabo.tasks.base import Setup, check_at_least_one

MIN_ITEMS = 8  # of a client: batch statistics need some on either side


def _backbone(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(64, width),
        nn.BatchNorm1d(width, track_running_stats=False),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.BatchNorm1d(width, track_running_stats=False),
        nn.ReLU(),
    )


@dataclass(frozen=True, kw_only=True)
class DigitsTask:
    """Learn a representation of digits under which a linear classifier does well."""

    example: ClassVar[str] = "--capacities 1,1/2,memory:400kB --policy rolling --rounds 20"
    width: Annotated[int, "hidden units of the full model"] = 128
    penalty: Annotated[float, "weight penalty of the classifier"] = 0.01

    def __post_init__(self) -> None:
        check_at_least_one(self, "width")

    def build(self, capacities: Sequence[Resources], rounds: int, seed: int, device: str) -> Setup:
        with needs("tasks", "digits"):
            from sklearn.datasets import load_digits  # slow to import

        images, labels = (torch.tensor(a) for a in load_digits(return_X_y=True))
        order = torch.randperm(len(labels), generator=stream(seed, "digits"))
        images, labels = (images.float() / 16)[order].to(device), labels[order].to(device)
        num_test = len(labels) // 4
        most = (len(labels) - num_test) // MIN_ITEMS
        if len(capacities) > most:
            raise ValueError(f"digits are for at most {most} clients, got {len(capacities)}")
        test = images[:num_test], labels[:num_test]
        with torch.random.fork_rng():
            torch.manual_seed(seed_of(seed, "init"))
            problem = self.problem(images[num_test : num_test + 8], device)
        clients = []
        for i, capacity in enumerate(capacities):
            own = slice(num_test + i, None, len(capacities))
            x, y = images[own], labels[own]
            half = len(y) // 2
            clients.append(
                Client(problem.on(inner=(x[:half], y[:half]), outer=(x[half:], y[half:])), capacity)
            )

        def evaluate(state: State, ledger: Ledger) -> dict[str, float]:
            own = problem.on(inner=test, outer=test)
            x, y = ledger.ever_trained("x", state.x), ledger.ever_trained("y", state.y)
            with torch.no_grad():
                logits = F.linear(own.features(x, test), y["weight"], y["bias"])
            return {"accuracy": float((logits.argmax(dim=1) == test[1]).double().mean())}

        options = {"num_inner_steps": 20, "alpha": 0.5}
        joint = {"levels": "both", "beta": 0.1, "momentum": 0.9}
        return Setup(clients, evaluate, "accuracy", options, dict.fromkeys(SINGLE_LEVEL, joint))

    def problem(self, example: Tensor, device: str) -> Problem:
        def features(x: Any, data: tuple[Tensor, Tensor]) -> Tensor:
            # unit length on average bounds the curvature of the classifier's problem
            z = x(data[0])
            return z / z.square().sum(dim=1).mean().clamp(min=1e-12).sqrt()

        def inner(z: Tensor, y: Any, data: tuple[Tensor, Tensor]) -> Tensor:
            penalty = self.penalty * sum(w.square().sum() for w in y.values()) / 2
            return F.cross_entropy(y(z), data[1]) + penalty

        def outer(z: Tensor, y: Any, data: tuple[Tensor, Tensor]) -> Tensor:
            return F.cross_entropy(y(z), data[1])

        return Problem(
            inner=inner,
            outer=outer,
            features=features,
            x=_backbone(self.width).to(device),
            y=nn.Linear(self.width, 10).to(device),
            example=example,
            labels=lambda data: data[1],
        )
