"""Compare all bilevel methods, with default options, on like and on skewed clients.

Handwritten digits of scikit-learn, 20 clients of 60 images, 10 clients a round. Half of a client's
images are for g, half for f. x is a linear layer with ReLU, y a linear layer with an L2 penalty, so
g is strongly convex in y. Skewed clients hold images of few classes. Widths are 1 for all clients,
or 1, 1, 1/2, 1/2, 1/4 in turn (mixed).

  python -m experiments which-method --jobs 2 --out results/which-method/runs.jsonl
  python -m experiments which-method --table results/which-method/runs.jsonl

NAME:option=value;option=value sets options of a method, as JSON or as a word. Accuracy is that of
the full model on 597 test images after the last round. Costs are means over rounds and clients at
full width. A failed run counts as 10 %.
"""

import argparse
import json
import os
import shlex
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, pstdev
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import rabo
from rabo.federation.rounds import CALIBRATION, Round
from rabo.runs.record import versions

NUM_CLIENTS = 20
CHANCE = 0.1
WIDTHS = {"full": (1.0,), "mixed": (1, 1, 1 / 2, 1 / 2, 1 / 4)}
METHODS = (
    "rabo:warm_up=60,rabo:hypergradient=zero,rabo,rafbo,rabo:hessian=global,rafbo:hessian=global,"
    "simrabo,simrafbo,simfbo,simfbo:policy=importance,shrofbo,fednest,fednest:policy=importance,"
    "fedmbo,aggitd,fedbio,fedbioacc,static,fedavg"
)
ZERO = {"name": "conjugate-gradient", "num_iterations": 0}  # v = 0: ∇_x f alone


class Run(NamedTuple):
    """One run: a method with options, the classes and widths of clients, and a seed."""

    method: str
    classes: int
    widths: str
    seed: int
    rounds: int


class Data(NamedTuple):
    """Images, labels, and the images of each client; the last 597 are for the test."""

    images: Tensor
    labels: Tensor
    clients: Sequence[Tensor]


def deal(classes: int, seed: int) -> Data:
    """Shuffle the digits and deal 60 images to each client, from some classes or from all."""
    images, labels = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=draw)
    images, labels = images.float()[order] / 16, labels[order].long()
    train = torch.argsort(labels[:1200], stable=True) if classes < 10 else torch.arange(1200)
    shards = train.split(1200 // (NUM_CLIENTS * classes))
    hands = torch.randperm(len(shards), generator=draw).split(classes)
    held = [torch.cat([shards[j] for j in hand]) for hand in hands]
    return Data(images, labels, [h[torch.randperm(len(h), generator=draw)] for h in held])


def clients_of(data: Data, widths: str, seed: int) -> tuple[rabo.Problem, list[rabo.Client]]:
    """State the problem and bind each client's images: even ones to g, odd ones to f."""
    torch.manual_seed(seed)

    def outer(z: Tensor, y: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(y(z), batch[1])

    def inner(z: Tensor, y: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return outer(z, y, batch) + 0.01 * (y.weight.square().sum() + y.bias.square().sum())

    problem = rabo.Problem(
        inner=inner,
        outer=outer,
        features=lambda x, batch: x(batch[0]),
        x=nn.Sequential(nn.Linear(64, 64), nn.ReLU()),
        y=nn.Linear(64, 10),
        example=data.images[:8],
    )
    clients = []
    for i, own in enumerate(data.clients):
        parts = ((data.images[h], data.labels[h]) for h in (own[::2], own[1::2]))
        width = WIDTHS[widths][i % len(WIDTHS[widths])]
        clients.append(
            rabo.Client(problem.on(**dict(zip(("inner", "outer"), parts, strict=True))), width)
        )
    return problem, clients


def options_of(words: str) -> tuple[str, dict[str, Any]]:
    """Split NAME:option=value;option=value."""
    name, _, rest = words.partition(":")
    options: dict[str, Any] = {}
    for pair in filter(None, rest.split(";")):
        key, _, value = pair.partition("=")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = ZERO if (key, value) == ("hypergradient", "zero") else value
    return name, options


def costs(history: Sequence[Round]) -> dict[str, float]:
    """Return the mean cost of one client in one round, without measurements of the curvature."""
    entries = [e for done in history for e in done.entries if e.phase != CALIBRATION]
    turns = sum(len(done.present) for done in history)
    if not turns:
        return {}
    return {
        "exchanges": len(entries) / turns,
        "multiply_adds": sum(e.cost.multiply_adds for e in entries) / turns,
        "bytes_up": sum(e.cost.bytes_up for e in entries) / turns,
        "bytes_down": sum(e.cost.bytes_down for e in entries) / turns,
        "memory": max(e.cost.peak_memory_bytes for e in entries),
        "measured": sum(done.cost.multiply_adds for done in history) / turns,
    }


def _mean(values: Sequence[float]) -> float:
    return mean(values) if values else 0.0


def perform(run: Run) -> dict[str, Any]:
    """Do one run; a failure is part of its result."""
    torch.set_num_threads(1)
    data = deal(run.classes, run.seed)
    problem, clients = clients_of(data, run.widths, run.seed)
    algorithm, options = options_of(run.method)
    history: list[Round] = []
    accuracy, error = CHANCE, ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = rabo.solve(
                clients,
                algorithm=algorithm,
                rounds=run.rounds,
                seed=run.seed,
                participation=0.5,
                on_round=history.append,
                **options,
            )
            x: Any = problem.x
            y: Any = problem.y
            with torch.no_grad():
                z = functional_call(x, dict(result.x), (data.images[1200:],))
                scores = functional_call(y, dict(result.y), (z,))
            accuracy = float((scores.argmax(1) == data.labels[1200:]).float().mean())
        except Exception as raised:  # the others go on; the table counts this one as failed
            error = f"{type(raised).__name__}: {raised}"
    return {
        **run._asdict(),
        "accuracy": accuracy,
        "largest_norm": max((d.metrics.get("hypergradient_norm", 0.0) for d in history), default=0),
        "disagreement": _mean([d.metrics.get("disagreement", 0.0) for d in history]),
        "a_round": costs(history),
        "error": error,
        "warnings": sorted({type(each.message).__name__ for each in caught}),
    }


def tables(records: Iterable[Mapping[str, Any]]) -> str:
    """Format accuracies, and costs relative to RABO, as Markdown."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        found.setdefault(record["method"], []).append(record)
    columns = [(c, w) for c in (10, 2) for w in WIDTHS]
    lines = ["| method | " + " | ".join(f"{c} classes, {w}" for c, w in columns) + " | norm |"]
    lines.append("|---" * (len(columns) + 2) + "|")
    for method, runs in found.items():
        cells = [_accuracy([r for r in runs if (r["classes"], r["widths"]) == c]) for c in columns]
        norm = max(r["largest_norm"] for r in runs)
        lines.append(f"| {method} | " + " | ".join(cells) + f" | {norm:.2g} |")
    lines += ["", "| method | exchanges | multiply-adds | bytes up | bytes down | memory |"]
    lines.append("|---" * 6 + "|")
    base = _costs(found.get("rabo", []))
    for method, runs in found.items():
        own = _costs(runs)
        if not own:
            continue
        shares = [f"{own[n] / base[n]:.2f}" if base else f"{own[n]:.3g}" for n in _RELATIVE]
        lines.append(f"| {method} | {own['exchanges']:.1f} | " + " | ".join(shares) + " |")
    return "\n".join(lines)


_RELATIVE = ("multiply_adds", "bytes_up", "bytes_down", "memory")


def _accuracy(runs: Sequence[Mapping[str, Any]]) -> str:
    if not runs:
        return "–"
    values = [100 * r["accuracy"] for r in runs]
    failed = sum(bool(r["error"]) for r in runs)
    spread = f" ± {pstdev(values):.1f}" if len(values) > 1 else ""
    return f"{mean(values):.1f}{spread}" + (f", {failed} failed" if failed else "")


def _costs(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    own = [r["a_round"] for r in runs if r["widths"] == "full" and r["a_round"]]
    return {name: mean(c[name] for c in own) for name in own[0]} if own else {}


def main(words: Sequence[str]) -> int:
    """Perform the runs that a command line asks for, and print their table."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments which-method",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--methods", default=METHODS, help="separated by commas (default: all)")
    add("--classes", default="10,2", help="classes of a client (default: 10,2)")
    add("--widths", default=",".join(WIDTHS), help="full, mixed or both (default: both)")
    add("--seeds", type=int, default=5, help="number of seeds (default: 5)")
    add("--rounds", type=int, default=60, help="(default: 60)")
    add("--jobs", type=int, default=1, help="worker processes, one thread each (default: 1)")
    add("--out", type=Path, help="JSONL file; every run appends a line")
    add("--table", type=Path, help="print the tables of such a file and stop")
    args = parser.parse_args(words)
    if args.table:
        print(tables(json.loads(line) for line in args.table.read_text().splitlines()))
        return 0
    runs = [
        Run(method, classes, widths, seed, args.rounds)
        for method in args.methods.split(",")
        for classes in map(int, args.classes.split(","))
        for widths in args.widths.split(",")
        for seed in range(args.seeds)
    ]
    os.environ["OMP_NUM_THREADS"] = "1"  # of the workers
    about = {
        "command": shlex.join(["python", "-m", "experiments", "which-method", *words]),
        "versions": versions(),
    }
    done: dict[Run, dict[str, Any]] = {}
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as workers:
        started = {workers.submit(perform, run): run for run in runs}
        for ended in as_completed(started):
            run, found = started[ended], ended.result()
            done[run] = found
            print(*run[:4], f"{found['accuracy']:.3f}", found["error"][:120], flush=True)
            if args.out:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                date = datetime.now(UTC).isoformat(timespec="seconds")
                with args.out.open("a") as lines:
                    lines.write(json.dumps({**found, **about, "date": date}) + "\n")
    print(tables(done[run] for run in runs))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
