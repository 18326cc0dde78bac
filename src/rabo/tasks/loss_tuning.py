"""Loss-function tuning on an imbalanced set (the paper's second experiment).

y is a classifier trained on a long-tailed set with the VS loss, x = [w, l, Δ] are that loss's
parameters, chosen so that this y does well on validation data.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rabo.algorithms import Adam, Cosine, State
from rabo.errors import lookup
from rabo.exchange.budgets import Resources
from rabo.federation.clients import Client
from rabo.federation.ledger import Ledger
from rabo.files import with_statistics
from rabo.hypergradients import Neumann
from rabo.models.convolutional import ResNet18
from rabo.models.layers import norm
from rabo.problems.problem import Problem
from rabo.pruning.policies import Static
from rabo.seeding import seed_of, stream
from rabo.tasks.base import Setup, equal_steps
from rabo.tasks.data.cifar10 import load_cifar10
from rabo.tasks.data.digits import load_digits
from rabo.tasks.data.images import Images
from rabo.tasks.data.splits import dirichlet, holdout, iid, long_tail, shards
from rabo.tasks.image_batches import ImageBatches, prepare
from rabo.tree import Params

BATCH = 64


@dataclass(frozen=True, kw_only=True)
class LossTuningTask:
    """Tune the VS loss so that a classifier of a long-tailed set treats all classes well."""

    capacities: ClassVar[str] = "1/2"  # of all clients, unless given
    example: ClassVar[str] = "--dataset digits --capacities 1/2 --rounds 30"
    dataset: Annotated[str, "cifar10, or digits (needs no download)"] = "digits"
    data_root: Annotated[str, "folder of the data (else RABO_DATA, else the user cache)"] = ""
    download: Annotated[bool, "download what is missing"] = False
    ratio: Annotated[float, "images of the most over those of the least frequent class"] = 100.0
    width: Annotated[int, "channels of the first stage (64: ResNet-18; digits: 16)"] = 0
    upper: Annotated[str, "balanced cross-entropy, or literal (the VS loss)"] = "balanced"
    outer_batch: Annotated[int, "images on which the upper loss is taken"] = BATCH
    weight_decay: Annotated[float, "of the classifier"] = 5e-4
    augment: Annotated[bool, "random crops and flips in training (cifar10)"] = True
    split: Annotated[str, "shards, iid (equal shares of each class) or dirichlet (by class)"] = (
        "shards"
    )
    concentration: Annotated[float, "of the Dirichlet split"] = 0.1
    held_out: Annotated[
        str,
        "test set, validation (clients' validation data), or aside (half of it, f has the rest)",
    ] = "test"

    def __post_init__(self) -> None:
        for name, known in (
            ("dataset", ("cifar10", "digits")),
            ("upper", ("balanced", "literal")),
            ("split", ("shards", "iid", "dirichlet")),
            ("held_out", ("test", "validation", "aside")),
        ):
            lookup(name.replace("_", "-"), getattr(self, name), dict.fromkeys(known, 0))
        if self.outer_batch < 1:
            raise ValueError(f"outer_batch must be at least 1, got {self.outer_batch}")

    def build(self, capacities: Sequence[Resources], rounds: int, seed: int, device: str) -> Setup:
        data = self._load()
        tail = long_tail(data.train_labels, self.ratio, stream(seed, "long tail"))
        images, labels = data.train[tail].to(device), data.train_labels[tail].to(device)
        counts = labels.bincount(minlength=len(data.classes)).float()
        with torch.random.fork_rng():
            torch.manual_seed(seed_of(seed, "init"))
            problem = self.problem(images.shape[1], counts, device)
        parts = [
            self._client_parts(labels, own, seed, i)
            for i, own in enumerate(self._shards(labels.cpu(), len(capacities), seed))
        ]
        judged = torch.cat([b for _, b in parts])
        if self.held_out == "aside":  # of every class, so that nothing is trained on it
            halves = holdout(labels[judged].cpu(), 0.5, stream(seed, "aside"))
            judged = judged[halves.validation.to(device)]
            parts = [(a, b[~torch.isin(b, judged)]) for a, b in parts]
        clients = [
            Client(problem.on(inner=(images[a], labels[a]), outer=(images[b], labels[b])), capacity)
            for (a, b), capacity in zip(parts, capacities, strict=True)
        ]
        train = torch.cat([a for a, _ in parts])
        if self.held_out == "test":
            test = data.test.to(device), data.test_labels.to(device)
        else:
            test = images[judged], labels[judged]
        judge = Judge(problem, images[train], test, counts)
        steps = max(5, round(len(train) / len(parts) / BATCH))
        series = {"num_terms": 1, "step_size": 0.1}  # more terms grow where curvature is negative
        return Setup(
            clients,
            judge,
            "balanced_accuracy",
            {
                # all clients have the same width as a rule: masks that follow the weights would
                # wander off to channels nobody has trained yet, and undo what was learnt
                "policy": Static(),
                "levels": "y",  # single-level methods train on the untuned loss
                "num_inner_steps": steps,  # a local epoch
                "beta": Cosine(0.05, rounds),
                "momentum": 0.9,
                "alpha": 0.05,
                "outer_step": Adam(),
                "warm_up": min(10, rounds // 5),
                "num_terms": series["num_terms"],
                "smoothness": 1 / series["step_size"],
            },
            {
                **equal_steps(steps),
                "simfbo": {"num_local_steps": steps, "radius": 1.0},
                "shrofbo": {"num_local_steps": steps, "radius": 1.0},
                "fedavg": {"policy": Static()},
                "rabo": {"hypergradient": Neumann(**series, products="recomputed")},
                "rafbo": {"hypergradient": Neumann(**series, products="difference")},
            },
            evaluate_every=10,
            finish=judge.write,
            export=judge.export,
        )

    def problem(self, in_channels: int, counts: Tensor, device: str) -> Problem:
        """The bilevel problem of all clients: g the VS loss, f a loss that treats classes alike."""
        num_classes = len(counts)
        balance = (counts.sum() / num_classes / counts).to(device)

        def inner(x: Any, y: Any, data: tuple[Tensor, Tensor]) -> Tensor:
            weights = torch.cat([w.reshape(-1) for w in y.values()])  # few kernels for all
            return vs_loss(y(data[0]), data[1], x) + self.weight_decay / 2 * weights.square().sum()

        def outer(x: Any, y: Any, data: tuple[Tensor, Tensor]) -> Tensor:
            if self.upper == "literal":
                return vs_loss(y(data[0]), data[1], x)
            losses = F.cross_entropy(y(data[0]), data[1], reduction="none")
            return (balance[data[1]] * losses).mean()

        y = self._classifier(in_channels, num_classes)
        size = 32 if in_channels == 3 else 8
        example = torch.rand(8, in_channels, size, size, generator=stream(0, "example"))
        return Problem(
            inner=inner,
            outer=outer,
            x={name: torch.zeros(num_classes, device=device) for name in ("w", "l", "delta")},
            y=y.to(device),
            example=example.to(device),
            sample=ImageBatches(BATCH, self.outer_batch, self.augment and in_channels == 3),
            labels=lambda data: data[1],
        )

    def _load(self) -> Images:
        if self.dataset == "digits":
            return load_digits()
        return load_cifar10(self.data_root or None, download=self.download)

    def _shards(self, labels: Tensor, num_clients: int, seed: int) -> Sequence[Tensor]:
        generator = stream(seed, "shards")
        if self.split == "shards":
            return shards(labels, num_clients, generator)
        if self.split == "iid":
            return iid(labels, num_clients, generator)
        return dirichlet(labels, num_clients, self.concentration, generator, min_size=BATCH)

    def _client_parts(
        self, labels: Tensor, own: Tensor, seed: int, client: int
    ) -> tuple[Tensor, Tensor]:
        """80 % to train on and 20 % to validate on, as positions in the long-tailed set."""
        parts = holdout(labels[own.to(labels.device)].cpu(), 0.2, stream(seed, "holdout", client))
        return own[parts.train].to(labels.device), own[parts.validation].to(labels.device)

    def _classifier(self, in_channels: int, num_classes: int) -> nn.Module:
        if in_channels == 3:
            return ResNet18(num_classes, self.width or 64)
        width = self.width or 16
        return nn.Sequential(
            nn.Conv2d(in_channels, width, 3, padding=1, bias=False),
            norm(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            norm(2 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * width, num_classes),
        )


def vs_loss(logits: Tensor, labels: Tensor, x: Any) -> Tensor:
    """The mean of −w_k log softmax(Δ f + l)_k, with w and Δ all ones and l zero at x = 0.

    Departs from the paper, whose free w can shrink the loss to zero: here w has mean one.
    """
    w, scale, offset = loss_parameters(x)
    losses = F.cross_entropy(scale * logits + offset, labels, reduction="none")
    return (w[labels] * losses).mean()


def loss_parameters(x: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return w (positive, mean one), Δ (in 0..2) and l."""
    return len(x["w"]) * torch.softmax(x["w"], 0), 2 * torch.sigmoid(x["delta"]), x["l"]


@dataclass(frozen=True, eq=False)
class Judge:
    """Balanced accuracy of the entries that were ever trained, and of the full model beside it."""

    problem: Problem
    train: Tensor
    test: tuple[Tensor, Tensor]
    counts: Tensor

    def __call__(self, state: State, ledger: Ledger) -> dict[str, Any]:
        per_class = self.per_class(ledger.ever_trained("y", state.y))
        balanced = full = float(per_class.nanmean())
        if ledger.summary()["y_trained"] < 1:
            full = float(self.per_class(state.y).nanmean())
        return {
            "balanced_accuracy": balanced,
            "full_accuracy": full,
            "offset_correlation": self._correlation(state.x),
            **self._loss(state.x),
            "accuracy_per_class": _numbers(per_class),
        }

    def per_class(self, y: Params) -> Tensor:
        """Return the accuracy on every class, NaN where there is nothing to judge it by."""
        model = self._model(y)
        images, labels = self.test
        with torch.no_grad():
            guesses = torch.cat([model(prepare(b)).argmax(dim=1) for b in images.split(512)])
        right = (guesses == labels).double()
        num_classes = len(self.counts)
        total = torch.zeros(num_classes, dtype=torch.float64, device=labels.device)
        counts = labels.bincount(minlength=num_classes)
        return total.index_add(0, labels, right) / counts

    def export(self, state: State, ledger: Ledger) -> dict[str, Mapping[str, Tensor]]:
        """Return the loss's parameters, and the classifier with its norm statistics."""
        model = self._model(ledger.ever_trained("y", state.y))
        return {"x": dict(state.x), "y": model.state_dict()}

    def _model(self, y: Params) -> nn.Module:
        module = self.problem.definition.modules[1]
        assert module is not None
        return with_statistics(module, y, (prepare(b) for b in self.train.split(512)))

    def _correlation(self, x: Params) -> float:
        """How well the tuned offsets agree with the closed form l_k = log π_k."""
        offsets = x["l"].double().cpu()
        if not offsets.std() > 0:
            return 0.0
        anchor = (self.counts / self.counts.sum()).log().double().cpu()
        return float(torch.corrcoef(torch.stack([offsets, anchor]))[0, 1])

    def write(self, state: State, ledger: Ledger, out: Path) -> None:
        """Write the tuned loss beside the closed-form logit adjustment."""
        anchor = (self.counts / self.counts.sum()).log()
        table = {
            "class_counts": self.counts.tolist(),
            **self._loss(state.x),
            "log_prior": (anchor - anchor.mean()).tolist(),
            "accuracy_per_class": _numbers(self.per_class(ledger.ever_trained("y", state.y))),
        }
        (out / "loss.json").write_text(json.dumps(table, indent=2) + "\n")

    def _loss(self, x: Params) -> dict[str, list[float]]:
        w, scale, offset = loss_parameters(x)
        return {"w": w.tolist(), "delta": scale.tolist(), "l": offset.tolist()}


def _numbers(values: Tensor) -> list[float | None]:
    """Return what JSON can hold: None for NaN."""
    return [None if isnan(value) else value for value in values.tolist()]
