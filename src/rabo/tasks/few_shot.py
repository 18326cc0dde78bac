"""Hyper-representation for few-shot learning (the paper's first experiment).

x is a backbone, y the head of an N-way K-shot task: y is fitted to the support set, x so that this
y does well on the queries.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from rabo.algorithms import SINGLE_LEVEL, State
from rabo.errors import lookup, needs
from rabo.exchange.budgets import Resources
from rabo.federation.clients import Client
from rabo.federation.ledger import Ledger
from rabo.models.convolutional import Conv4, ResNet12
from rabo.models.kernels.dispatch import has_kernels
from rabo.models.kernels.task_batching import side_by_side
from rabo.problems.bilevel import Batch
from rabo.problems.problem import ClientProblem, Problem
from rabo.seeding import seed_of, stream
from rabo.tasks.adaptation import accuracy_interval, adapt_heads
from rabo.tasks.base import Setup, equal_steps
from rabo.tasks.data.characters import Characters, Split
from rabo.tasks.data.episodes import Tasks, check_task, sample_tasks
from rabo.tasks.data.glyphs import make_glyphs
from rabo.tasks.data.omniglot import load_omniglot
from rabo.tasks.data.splits import character_shards, dirichlet, iid
from rabo.tasks.pictures import draw_tasks
from rabo.tree import Params

CHUNK = 50  # test tasks that are adapted at once
IMAGES = 5000  # of test tasks that pass the backbone at once: what it holds of them is the most
VALIDATION_ALPHABETS = 6  # of the training alphabets, held out for choosing settings


@dataclass(frozen=True, kw_only=True)
class FewShotTask:
    """Learn features under which a head learns new characters from a few drawings."""

    example: ClassVar[str] = "--backbone conv4 --ways 5 --shots 1 --capacities 1,1/2 --rounds 40"
    dataset: Annotated[str, "omniglot, or glyphs (generated: needs no download)"] = "glyphs"
    data_root: Annotated[str, "folder of the data (else RABO_DATA, else the user cache)"] = ""
    download: Annotated[bool, "download what is missing"] = False
    ways: Annotated[int, "classes of a task (N)"] = 5
    shots: Annotated[int, "support drawings per class (K)"] = 1
    queries: Annotated[int, "query drawings per class in training (0: 20 - K)"] = 0
    tasks: Annotated[int, "tasks of a client and round"] = 4
    backbone: Annotated[str, "resnet12 or conv4"] = "resnet12"
    channels: Annotated[str, "widths of the backbone (64,160,320,640; conv4: 64)"] = ""
    head: Annotated[str, "linear or mlp"] = "linear"
    heads: Annotated[str, "per-task, or shared (the paper)"] = "per-task"
    penalty: Annotated[float, "weight penalty of the head"] = 0.003
    split: Annotated[str, "shards (of characters), iid or dirichlet (by alphabet)"] = "shards"
    concentration: Annotated[float, "of the Dirichlet split"] = 0.1
    test_tasks: Annotated[int, "tasks of an evaluation"] = 600
    interim_tasks: Annotated[int, "tasks of an evaluation before the last (0: as many)"] = 0
    test_steps: Annotated[int, "steps with which a head adapts to a test task"] = 100
    held_out: Annotated[
        str, "judge on: test alphabets, validation (of the training alphabets), or none held out"
    ] = "test"

    def __post_init__(self) -> None:
        _choose("dataset", self.dataset, ("omniglot", "glyphs"))
        _choose("backbone", self.backbone, ("resnet12", "conv4"))
        _choose("head", self.head, ("linear", "mlp"))
        _choose("heads", self.heads, ("per-task", "shared"))
        _choose("split", self.split, ("shards", "iid", "dirichlet"))
        _choose("held_out", self.held_out, ("test", "validation", "none"))
        for name, least in (("test_tasks", 1), ("interim_tasks", 0), ("test_steps", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.ways < 2:
            raise ValueError(f"ways must be at least 2, got {self.ways}: one class is always right")

    def build(self, capacities: Sequence[Resources], rounds: int, seed: int, device: str) -> Setup:
        with needs("tasks", "few-shot tasks"):
            import PIL  # noqa: F401  # pictures of test tasks end a run: fail before it begins
        train, test = self.load()
        train, test = train.to(device), test.to(device)
        shards = self.shards(train, len(capacities), seed)
        for shard in shards:
            check_task(len(shard), train.images.shape[1], self.ways, self.shots, 1, self.tasks)
        with torch.random.fork_rng():
            torch.manual_seed(seed_of(seed, "init"))
            problem = self.problem(device)
        clients = [
            Client(problem.on(inner=train.select(s), outer=None), capacity)
            for s, capacity in zip(shards, capacities, strict=True)
        ]
        options = {"num_inner_steps": 20, "momentum": 0.8, "alpha": 0.3}
        # x too, of whose curvature beta="auto" knows nothing; chosen on validation alphabets
        joint = {"levels": "both", "beta": 0.1, "momentum": 0.9, "num_inner_steps": 5}
        single = dict(joint)
        if self.heads == "per-task":
            # such a head has few steps. 30 and 0.03 do well at 5-way; slopes fall with the classes
            single |= {"beta": 6.0 * self.ways, "beta_x": 0.03}
        own = {
            **equal_steps(20),
            **dict.fromkeys(SINGLE_LEVEL, single),
            "dist-protonet": joint,
            "dist-maml": {**joint, "adapt_rate": 2.0},
        }
        judge = _Judge(self, problem, test, rounds)
        setup = Setup(
            clients, judge, "accuracy", options, own, evaluate_every=20, finish=judge.draw
        )

        def judged_by(predict: Callable[..., Tensor]) -> Setup:
            other = replace(judge, predict=predict)
            return replace(setup, evaluate=other, finish=other.draw)

        return replace(setup, judged_by=judged_by)

    def problem(self, device: str) -> Problem:
        """The bilevel problem of all clients: g on support sets, f on queries."""
        backbone, num_features = self._backbone()
        copies = self.tasks if self.heads == "per-task" else 1
        return Problem(
            inner=self._inner,
            outer=_cross_entropy,
            features=represent,
            x=backbone.to(device),
            y=self._head(num_features).to(device),
            example=torch.rand(8, 1, 28, 28, generator=stream(0, "example")).to(device),
            sample=self._sample,
            redraw="round",
            copies=copies,
            ways=self.ways,
        )

    def _inner(self, z: Tensor, y: Any, data: tuple[Tensor, Tensor]) -> Tensor:
        # every task has the mean loss of its support set, and its own share of the penalty
        squares = sum(w.square().sum() for w in y.values()) / max(1, y.copies)
        return _cross_entropy(z, y, data) + self.penalty / 2 * squares

    def _sample(self, data: Batch, generator: Generator) -> Batch:
        queries = self.queries or None
        t = sample_tasks(
            data.inner,
            ways=self.ways,
            shots=self.shots,
            queries=queries,
            num_tasks=self.tasks,
            generator=generator,
        )
        return Batch((t.support, t.support_labels), (t.query, t.query_labels))

    def load(self) -> Split:
        """Return the characters to train on and those to judge on."""
        if self.dataset == "glyphs":
            data = make_glyphs(0)
        else:
            data = load_omniglot(self.data_root or None, download=self.download)
        if self.held_out == "test":
            return data
        if self.held_out == "none":  # what is trained on, to compare with
            return Split(data.train, data.train)
        names = sorted(set(data.train.alphabets))
        order = torch.randperm(len(names), generator=stream(0, "validation")).tolist()
        held = {names[i] for i in order[:VALIDATION_ALPHABETS]}
        inside = torch.tensor([name in held for name in data.train.alphabets])
        return Split(
            data.train.select((~inside).nonzero().squeeze(1)),
            data.train.select(inside.nonzero().squeeze(1)),
        )

    def shards(self, train: Characters, num_clients: int, seed: int) -> Sequence[Tensor]:
        """Return the positions of each client's characters."""
        generator = stream(seed, "shards")
        if self.split == "shards":
            return character_shards(len(train), num_clients, generator)
        names = sorted(set(train.alphabets))
        labels = torch.tensor([names.index(name) for name in train.alphabets])
        if self.split == "iid":
            return iid(labels, num_clients, generator)
        return dirichlet(labels, num_clients, self.concentration, generator, min_size=self.ways)

    def _backbone(self) -> tuple[nn.Module, int]:
        default = "64,160,320,640" if self.backbone == "resnet12" else "64"
        try:
            widths = [int(w) for w in (self.channels or default).split(",")]
        except ValueError:
            raise ValueError(
                f"channels must be widths such as {default}, got {self.channels!r}"
            ) from None
        if self.backbone == "resnet12":
            if len(widths) != 4:
                raise ValueError(f"resnet12 must have four widths, got {self.channels!r}")
            return ResNet12(widths), widths[-1]
        return Conv4(widths[0]), widths[0]

    def _head(self, num_features: int) -> nn.Module:
        """Start linear heads from zero: tasks label their classes at random."""
        if self.head == "mlp":
            return nn.Sequential(nn.Linear(num_features, 64), nn.Tanh(), nn.Linear(64, self.ways))
        head = nn.Linear(num_features, self.ways)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        return head


class Representation:
    """Features of all tasks, with batch statistics of each task, of unit size on average.

    Their size bounds the curvature of the head's problem, l_{g,1}, whatever the backbone does.
    """

    def __call__(self, x: Any, data: tuple[Tensor, Tensor]) -> Tensor:
        images = data[0]
        if images.is_cuda:
            return _of_unit_size(all_at_once(x, images))
        # one by one what a processor has in its caches stays there
        return _of_unit_size(torch.stack([x(task) for task in images]))

    def many(self, x: Any, parts: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Return the features of support sets and queries, in one pass if that pays."""
        if not self.joins(parts):
            return [self(x, part) for part in parts]
        return [_of_unit_size(z) for z in both_at_once(x, *(images for images, _ in parts))]

    def joins(self, parts: Sequence[tuple[Tensor, Tensor]]) -> bool:
        """Say whether one pass takes both: where norms have kernels for two sets, on a GPU."""
        if len(parts) != 2:
            return False
        images = parts[0][0]
        with side_by_side(len(images)):
            return has_kernels(images)


represent = Representation()


def _of_unit_size(z: Tensor) -> Tensor:
    # bounded before the root, whose slope at zero is infinite: a submodel may have no features left
    size = z.square().sum(dim=2, keepdim=True).mean(dim=1, keepdim=True).clamp(min=1e-12)
    return z / size.sqrt()


def both_at_once(x: Any, support: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Return the features of both sets of every task, each with statistics of its own."""
    first = support.shape[1]
    z = all_at_once(x, torch.cat([support, query], dim=1), first)
    return z[:, :first], z[:, first:]


def all_at_once(x: Any, images: Tensor, first: int = 0) -> Tensor:
    """Return the features of all tasks as of one batch; some first images may be a set apart."""
    num_tasks, num_images = images.shape[:2]
    with side_by_side(num_tasks, first):
        z = x(images.transpose(0, 1).flatten(0, 1))
    return z.reshape(num_images, num_tasks, -1).transpose(0, 1)


def _cross_entropy(z: Tensor, y: Any, data: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(y(z).flatten(0, 1), data[1].flatten())


def _choose(name: str, value: str, known: Sequence[str]) -> None:
    lookup(name.replace("_", "-"), value, dict.fromkeys(known, 0))


@dataclass(frozen=True, eq=False)
class _Judge:
    """Accuracy on held-out alphabets: heads adapt to support sets, x stays as it is.

    An algorithm that has its own way to meet a task gives it as `predict`.
    """

    task: FewShotTask
    problem: Problem
    characters: Characters
    rounds: int
    predict: Callable[..., Tensor] | None = None

    def __call__(self, state: State, ledger: Ledger) -> dict[str, float]:
        """Judge the entries that were ever trained, and the full model where that is more."""
        is_last = state.round >= self.rounds
        number = self.task.test_tasks
        if self.task.interim_tasks and not is_last:
            number = min(number, self.task.interim_tasks)
        trained = {n: ledger.ever_trained(n, getattr(state, n)) for n in ("x", "y")}
        mean, interval = accuracy_interval(self.accuracies(**trained, number=number))
        found = {"accuracy": mean, "interval": interval}
        if ledger.summary()["x_trained"] < 1:
            full = self.accuracies(state.x, state.y, number)
            found["full_accuracy"], _ = accuracy_interval(full)
        return found

    def accuracies(self, x: Params, y: Params, number: int) -> Tensor:
        """Return the accuracy of a model on each of so many test tasks."""
        chunks = []
        for start in range(0, number, CHUNK):
            tasks = self._tasks(start, min(CHUNK, number - start))
            guesses = self.guesses(x, y, tasks)
            chunks.append((guesses == tasks.query_labels).double().mean(dim=1))
        return torch.cat(chunks)

    def _tasks(self, first: int, number: int) -> Tasks:
        """Test tasks are the same for every run and round."""
        return sample_tasks(
            self.characters,
            ways=self.task.ways,
            shots=self.task.shots,
            num_tasks=number,
            generator=stream("test tasks", first),
        )

    def guesses(self, x: Params, y: Params, tasks: Tasks) -> Tensor:
        """Return the class that each query of each task is taken for."""
        own = self.problem.on(inner=None, outer=None).with_copies(len(tasks.support))
        support, query = (tasks.support, tasks.support_labels), (tasks.query, tasks.query_labels)
        if self.predict is not None:
            with torch.no_grad():
                return self.predict(own, x, y, support, query).argmax(dim=2)
        with torch.no_grad():
            z, queries = _in_parts(own, x, support, query)
        heads = adapt_heads(own, z, y, support, self.task.test_steps)
        with torch.no_grad():
            return own.call(heads, queries).argmax(dim=2)

    def draw(self, state: State, ledger: Ledger, out: Path) -> None:
        """Write a picture of some test tasks with right and wrong predictions."""
        tasks = self._tasks(0, min(4, self.task.test_tasks))
        trained = {n: ledger.ever_trained(n, getattr(state, n)) for n in ("x", "y")}
        draw_tasks(tasks, self.guesses(**trained, tasks=tasks), out / "tasks.png")


def _in_parts(problem: ClientProblem, x: Params, support: Any, query: Any) -> list[Tensor]:
    """Return the features of both sets, of no more tasks at once than memory should hold."""
    most = max(1, IMAGES // (support[0].shape[1] + query[0].shape[1]))
    parts = zip(*(tensor.split(most) for tensor in (*support, *query)), strict=True)
    found = [problem.features_of(x, ((a, b), (c, d))) for a, b, c, d in parts]
    return [torch.cat(z) for z in zip(*found, strict=True)]
