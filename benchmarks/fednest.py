"""CPU time of a round of FedNest over a hand-written loop in plain PyTorch.

Usage: OMP_NUM_THREADS=1 python -m benchmarks fednest OUT.json [ROUNDS] (two minutes)
To measure another version of rabo, call the Python that has it installed.

40 clients hold 100 images of 784 pixels each, half of them for g and half for f; 10 take part in a
round. x is Linear(784, 200) and ReLU, y is Linear(200, 10). Clients take five local epochs. The
images are random: the benchmark measures time and equality, not accuracy.
"""

import json
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

import rabo
from benchmarks.parts.timing import Setting, interleave, milliseconds, ratio
from rabo.algorithms import FedNest
from rabo.federation.federation import Federation
from rabo.runs.experiment import versions
from rabo.seeding import stream

CLIENTS, PRESENT, IMAGES, EPOCHS, PENALTY = 40, 10, 50, 5, 0.01
STEP, TERMS, SMOOTHNESS = 0.02, 5, 50.0  # α = β, N and L
COUNTS: Counter[str] = Counter()
Data = tuple[Tensor, Tensor]
Tensors = list[Tensor]


class Share(NamedTuple):
    """The data of one client."""

    inner: Data
    outer: Data


def modules(dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """Return x and y."""
    torch.manual_seed(0)
    first = nn.Linear(784, 200, dtype=dtype)
    return nn.Sequential(first, nn.ReLU()), nn.Linear(200, 10, dtype=dtype)


def g(y: Any, z: Tensor, labels: Tensor) -> Tensor:
    """The inner loss: `y` is a module, or what stands for one in a loss of `rabo`."""
    COUNTS["gradients of g"] += 1
    weights = y.parameters() if isinstance(y, nn.Module) else y.values()
    penalty = sum(w.square().sum() for w in weights)
    return F.cross_entropy(y(z), labels) + PENALTY * penalty


def f(y: Any, z: Tensor, labels: Tensor) -> Tensor:
    COUNTS["gradients of f"] += 1
    return F.cross_entropy(y(z), labels)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count gradients of both losses, and products with ∇²_yy g and ∇²_xy g."""
    grad = torch.autograd.grad

    def counting(outputs: Any, inputs: Any, grad_outputs: Any = None, **options: Any) -> Any:
        COUNTS["products"] += grad_outputs is not None
        return grad(outputs, inputs, grad_outputs, **options)

    COUNTS.clear()
    found, torch.autograd.grad = Counter[str](), counting
    try:
        yield found
    finally:
        torch.autograd.grad = grad
        found.update(COUNTS)


def shares(skewed: bool, dtype: torch.dtype) -> list[Share]:
    """Deal random images; a skewed client has two classes."""
    generator = torch.Generator().manual_seed(0)

    def data(client: int) -> Data:
        labels = torch.randint(2 if skewed else 10, (IMAGES,), generator=generator)
        return torch.rand(IMAGES, 784, generator=generator).to(dtype), (labels + 2 * client) % 10

    return [Share(data(i), data(i)) for i in range(CLIENTS)]


def federation(held: Sequence[Share], batch_size: int, method: Any) -> Federation:
    x, y = modules(held[0].inner[0].dtype)
    problem = rabo.Problem(
        inner=lambda z, y, data: g(y, z, data[1]),
        outer=lambda z, y, data: f(y, z, data[1]),
        features=lambda x, data: x(data[0]),
        x=x,
        y=y,
        prune="none",
        batch_size=batch_size,
    )
    clients = [rabo.Client(problem.on(inner=own.inner, outer=own.outer)) for own in held]
    return Federation(clients, method, participation=PRESENT / CLIENTS, compare=False)


class Draws:
    """Batches of a client, drawn from one generator as a training loop does."""

    def __init__(self, held: Sequence[Share], size: int):
        self.held, self.size = held, size
        self.is_whole = size >= IMAGES
        self.generator = torch.Generator().manual_seed(0)

    def begin(self, round: int) -> None:
        """Start a round."""

    def skip(self, client: int) -> None:
        """Pass over the batch of a first step, which needs none."""

    def part(self, client: int, level: int) -> Data:
        """Draw a batch of one level."""
        if self.is_whole:
            return self.held[client][level]
        return self._take(client, level, self.generator)

    def both(self, client: int) -> tuple[Data, Data]:
        return self.part(client, 0), self.part(client, 1)

    def _take(self, client: int, level: int, generator: Generator) -> Data:
        images, labels = self.held[client][level]
        chosen = torch.randperm(IMAGES, generator=generator)[: self.size]
        return images[chosen], labels[chosen]


class SameDraws(Draws):
    """The batches that `rabo` draws."""

    def begin(self, round: int) -> None:
        self.round, self.drawn = round, Counter[int]()

    def skip(self, client: int) -> None:
        self.drawn[client] += 1

    def part(self, client: int, level: int) -> Data:
        return self.held[client][level] if self.is_whole else self.both(client)[level]

    def both(self, client: int) -> tuple[Data, Data]:
        generator = stream(0, self.round, client, "batch", self.drawn[client])
        self.skip(client)
        if self.is_whole:
            return self.held[client]
        return self._take(client, 0, generator), self._take(client, 1, generator)


class ByHand:
    """Rounds of FedNest as plain loops.

    One copy of the modules holds the server's parameters, the other those of the current client.
    """

    def __init__(self, fed: Federation, method: FedNest, draws: Draws):
        dtype = draws.held[0].inner[0].dtype
        (self.x, self.y), (self.moving_x, self.moving_y) = modules(dtype), modules(dtype)
        load(self.x, fed.state.x.values())
        load(self.y, fed.state.y.values())
        self.method, self.draws, self.tau = method, draws, method.num_local_steps
        self.number = 0

    def round(self, present: Sequence[int]) -> None:
        self.draws.begin(self.number)
        self._move_y(present)
        solve = self._hold_graphs if self.draws.is_whole else self._fresh_graphs
        h = solve(present, self.method.num_factors(self.number))
        load(self.x, mean(self._walk_x(i, h) for i in present))
        self.number += 1

    def _move_y(self, present: Sequence[int]) -> None:
        known: dict[int, Data] = {}

        def features(client: int) -> Data:
            if client in known:
                return known[client]
            images, labels = self.draws.part(client, 0)
            with torch.no_grad():
                z = self.x(images)
            if self.draws.is_whole:
                known[client] = z, labels
            return z, labels

        q = mean(gradient(g(self.y, *features(i)), self.y) for i in present)

        def walk(client: int) -> Tensors:
            self.draws.skip(client)
            load(self.moving_y, self.y.parameters())
            step(self.moving_y, q, STEP / self.tau)
            there = None
            for _ in range(1, self.tau):
                z, labels = features(client)
                if there is None or not self.draws.is_whole:
                    there = gradient(g(self.y, z, labels), self.y)
                here = gradient(g(self.moving_y, z, labels), self.moving_y)
                step(self.moving_y, corrected(here, there, q), STEP / self.tau)
            return [p.detach() for p in self.moving_y.parameters()]

        load(self.y, mean(walk(i) for i in present))

    def _walk_x(self, client: int, h: Tensors) -> Tensors:
        self.draws.skip(client)
        load(self.moving_x, self.x.parameters())
        step(self.moving_x, h, STEP / self.tau)
        there = None
        for _ in range(1, self.tau):
            images, labels = self.draws.part(client, 1)
            if there is None or not self.draws.is_whole:
                there = gradient(f(self.y, self.x(images), labels), self.x)
            here = gradient(f(self.y, self.moving_x(images), labels), self.moving_x)
            step(self.moving_x, corrected(here, there, h), STEP / self.tau)
        return [p.detach() for p in self.moving_x.parameters()]

    def _hold_graphs(self, present: Sequence[int], factors: int) -> Tensors:
        """Return h; one graph of all data serves the round."""
        x, y, slopes, graphs = *map(list, (self.x.parameters(), self.y.parameters())), {}, {}
        for i in present:
            (a, labels_g), (b, labels_f) = self.draws.both(i)
            slopes[i] = torch.autograd.grad(f(self.y, self.x(b), labels_f), [*y, *x])
            loss = g(self.y, self.x(a), labels_g)
            graphs[i] = torch.autograd.grad(loss, y, create_graph=True)
        p = [TERMS / SMOOTHNESS * s for s in mean(slope[: len(y)] for slope in slopes.values())]
        for _ in range(factors):
            products = (torch.autograd.grad(s, y, p, retain_graph=True) for s in graphs.values())
            p = descend(p, mean(products), 1 / SMOOTHNESS)
        cross = {i: torch.autograd.grad(graphs[i], x, p) for i in present}
        return mean(descend(slopes[i][len(y) :], cross[i], 1.0) for i in present)

    def _fresh_graphs(self, present: Sequence[int], factors: int) -> Tensors:
        """Return h; every answer draws a new batch."""
        x, y = map(list, (self.x.parameters(), self.y.parameters()))

        def slope_f(client: int) -> Tensors:
            images, labels = self.draws.part(client, 1)
            with torch.no_grad():
                z = self.x(images)
            return gradient(f(self.y, z, labels), self.y)

        def product(client: int, p: Tensors) -> Sequence[Tensor]:
            images, labels = self.draws.part(client, 0)
            with torch.no_grad():
                z = self.x(images)
            slope = torch.autograd.grad(g(self.y, z, labels), y, create_graph=True)
            return torch.autograd.grad(slope, y, p)

        def pull_back(client: int, p: Tensors) -> Tensors:
            (a, labels_g), (b, labels_f) = self.draws.both(client)
            direct = torch.autograd.grad(f(self.y, self.x(b), labels_f), x)
            slope = torch.autograd.grad(g(self.y, self.x(a), labels_g), y, create_graph=True)
            return descend(direct, torch.autograd.grad(slope, x, p), 1.0)

        p = [TERMS / SMOOTHNESS * s for s in mean(slope_f(i) for i in present)]
        for _ in range(factors):
            p = descend(p, mean(product(i, p) for i in present), 1 / SMOOTHNESS)
        return mean(pull_back(i, p) for i in present)


@torch.no_grad()
def load(module: nn.Module, values: Iterable[Tensor]) -> None:
    for p, value in zip(module.parameters(), values, strict=True):
        p.copy_(value)


@torch.no_grad()
def step(module: nn.Module, slope: Tensors, size: float) -> None:
    for p, s in zip(module.parameters(), slope, strict=True):
        p.sub_(s, alpha=size)


def gradient(loss: Tensor, module: nn.Module) -> Tensors:
    return list(torch.autograd.grad(loss, list(module.parameters())))


def corrected(here: Tensors, there: Tensors, mean: Tensors) -> Tensors:
    return [(a - b).add_(m) for a, b, m in zip(here, there, mean, strict=True)]


def descend(at: Iterable[Tensor], slope: Iterable[Tensor], size: float) -> Tensors:
    return [torch.sub(a, s, alpha=size) for a, s in zip(at, slope, strict=True)]


def mean(replies: Iterable[Sequence[Tensor]]) -> Tensors:
    """Return the mean of the lists of tensors that clients answer."""
    total, number = [], 0
    for reply in replies:
        number += 1
        total = [t.add_(r) for t, r in zip(total, reply, strict=True)] if total else copies(reply)
    return [t.div_(number) for t in total]


def copies(tensors: Sequence[Tensor]) -> Tensors:
    return [t.clone() for t in tensors]


def of_the_paper(tau: int, factors: float) -> dict[str, float]:
    """Gradients and products of one client in a round with a new batch for each."""
    return {
        "gradients of g": 1 + 2 * tau + factors + 1,
        "gradients of f": 2 + 2 * tau,
        "products": factors + 1,
    }


def compare(batch_size: int, skewed: bool, rounds: int) -> dict[str, Any]:
    held = shares(skewed, torch.float64)  # in which both must agree
    tau = EPOCHS * -(-IMAGES // batch_size)
    method = FedNest(
        num_inner_steps=1,
        num_local_steps=tau,
        num_terms=TERMS,
        smoothness=SMOOTHNESS,
        alpha=STEP,
        beta=STEP,
        max_outer_step=None,  # plain steps, as by hand
    )
    fed = federation(held, batch_size, method)
    hand = ByHand(fed, method, SameDraws(held, batch_size))
    runs = fed.run(rounds)
    present = [list(next(runs).present)]  # measures the curvature of g too, which is not counted
    with counted() as ours:
        present += [list(done.present) for done in runs]
    hand.round(present[0])
    with counted() as theirs:
        for clients in present[1:]:
            hand.round(clients)
    assert ours == theirs, f"counts differ: {ours} and {theirs}"
    error = max(
        distance(fed.state.x.values(), hand.x.parameters()),
        distance(fed.state.y.values(), hand.y.parameters()),
    )
    assert error < 1e-11, f"x or y differ by {error:.1e}"
    times = timed(shares(skewed, torch.float32), batch_size, method, present)
    per_client = PRESENT * (rounds - 1)
    factors = statistics.mean(method.num_factors(q) for q in range(1, rounds))
    return {
        "batches of": batch_size,
        "clients": "skewed" if skewed else "like",
        "local steps": tau,
        "ms": {name: round(milliseconds(found), 1) for name, found in times.items()},
        "ratio": round(ratio(times["rabo"], times["by hand"]), 3),
        "interval": interval(times["rabo"], times["by hand"]),
        "largest relative difference": float(f"{error:.2g}"),
        "counts of a client in a round": {k: round(v / per_client, 2) for k, v in ours.items()},
        "counts of the paper": {k: round(v, 2) for k, v in of_the_paper(tau, factors).items()},
    }


def timed(
    held: Sequence[Share], batch_size: int, method: FedNest, present: Sequence[Sequence[int]]
) -> dict[str, list[float]]:
    fed = federation(held, batch_size, method)
    hand, clients = ByHand(fed, method, Draws(held, batch_size)), iter(present)
    rounds = fed.run(len(present))
    contestants = {"rabo": lambda: next(rounds), "by hand": lambda: hand.round(next(clients))}
    return interleave(contestants, Setting(), len(present) - 2)


def distance(a: Any, b: Any) -> float:
    """Return the largest ‖a − b‖/‖b‖ over pairs of tensors."""
    pairs = zip(a, b, strict=True)
    return max(float(((s - t).norm() / t.norm()).detach()) for s, t in pairs)


def interval(times: Sequence[float], bar: Sequence[float]) -> list[float]:
    """Return the 95 % bootstrap interval of the ratio."""
    draw, pairs = random.Random(0), list(zip(times, bar, strict=True))
    found = sorted(
        ratio(*zip(*draw.choices(pairs, k=len(pairs)), strict=True)) for _ in range(2000)
    )
    return [round(found[50], 3), round(found[-51], 3)]


def main(out: str, rounds: str = "60") -> None:
    torch.set_num_threads(1)
    rows = []
    for batch_size in (64, 10):
        for skewed in (False, True):
            rows.append(compare(batch_size, skewed, int(rounds)))
            print(json.dumps(rows[-1], ensure_ascii=False), flush=True)
    found = {
        "what": "CPU milliseconds of a round of FedNest, median over rounds, both in turn",
        "command": f"OMP_NUM_THREADS=1 python -m benchmarks fednest OUT.json {rounds}",
        "versions": versions(),
        "rows": rows,
    }
    Path(out).write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
