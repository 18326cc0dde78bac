"""Rounds on a GPU, the same recordings without the round around them, and one pass or two.

Usage: python -m benchmarks replays OUT.json [PART ...] (about two minutes on an H200)
Rounds of which a PART is in the name, all without; measurements of curvature are left out.
"""

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.parts.timing import Setting, interleave, milliseconds, ratio
from benchmarks.parts.trial import Trial, trial_of
from benchmarks.rounds import CAPACITIES
from rabo.runs.experiment import Experiment
from rabo.tasks.few_shot import Representation

WIDE, TABLE_1 = "64,160,320,640", "32,64,128,256"
LOCAL = {"beta": 30.0, "beta_x": 0.03, "num_inner_steps": 5}
ROUNDS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "rabo mixed": ("rabo", CAPACITIES, WIDE, {}),
    "fedmbo full": ("fedmbo", "1", WIDE, {}),
    "rabo 1/16": ("rabo", "1/16", WIDE, {}),
    "rafbo mixed": ("rafbo", CAPACITIES, WIDE, {}),
    "rabo mixed, Table 1": ("rabo", CAPACITIES, TABLE_1, {}),
    "fedmbo full, Table 1": ("fedmbo", "1", TABLE_1, {}),
    "static mixed, Table 1": ("static", CAPACITIES, TABLE_1, LOCAL),
}
REPLAYS = 7


def trial(algorithm: str, capacities: str, channels: str, options: dict[str, Any]) -> Trial:
    experiment = Experiment(
        task="few-shot",
        task_options={"backbone": "resnet12", "channels": channels},
        algorithm=algorithm,
        algorithm_options=options,
        capacities=capacities,
        clients=10,
        device="cuda",
    )
    return trial_of(experiment)


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Return the milliseconds until work has been launched, and until the device has done it."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    launched = time.perf_counter()
    torch.cuda.synchronize()
    return 1000 * (launched - start), 1000 * (time.perf_counter() - start)


def replays(of: Trial) -> dict[str, Any]:
    """Time the recordings of a round, all at once and each alone."""
    grouped: Any = of.ledger.runtime.runtime  # type: ignore[attr-defined]
    players = [
        recording.player
        for local in grouped._kept.values()
        for key, recording in local.recordings.items()
        if recording is not None and "curvature" not in key[0][0]
    ]

    def all_at_once() -> None:
        for player in players:
            player.replay()
        for player in players:
            player.join()

    together = [timed(all_at_once) for _ in range(REPLAYS)]
    alone = [statistics.median(timed(p.replay)[1] for _ in range(REPLAYS)) for p in players]
    return {
        "recordings": len(players),
        "all_side_by_side_ms": round(statistics.median(t for _, t in together), 2),
        "launch_ms": round(statistics.median(t for t, _ in together), 2),
        "each": [round(t, 2) for t in alone],
    }


@contextmanager
def passes(one_pass: bool) -> Iterator[None]:
    """Let support sets and queries take one pass, as ever on a GPU, or two."""
    kept = Representation.joins
    if not one_pass:
        Representation.joins = lambda self, parts: False
    try:
        yield
    finally:
        Representation.joins = kept


def measure(names: list[str], one_pass: bool) -> list[dict[str, Any]]:
    """Time rounds in turn, the first of each kind not counted, and their recordings."""
    with passes(one_pass):
        trials = {name: trial(*ROUNDS[name]) for name in names}
        torch.cuda.reset_peak_memory_stats()
        work = {name: each.round for name, each in trials.items()}
        times = interleave(work, Setting(device="cuda"), 15, warmup=6)
        peak = torch.cuda.max_memory_allocated()
        full = next((name for name in names if "fedmbo" in name), None)  # if it was asked for
        rows = [
            {
                "round": name,
                "one_pass": one_pass,
                "ms": round(milliseconds(times[name]), 2),
                "least": round(1000 * min(times[name]), 2),
                "over_fedmbo": round(ratio(times[name], times[full]), 3) if full else None,
                **replays(trials[name]),
            }
            for name in names
        ]
        print(f"peak of all: {peak / 1e9:.1f} GB", flush=True)
    del trials, work
    gc.collect()
    torch.cuda.empty_cache()
    return rows


def difference() -> dict[str, float]:
    """Return how far x is apart after one round and after five, one pass against two."""
    reached: dict[bool, list[torch.Tensor]] = {}
    for one_pass in (True, False):
        with passes(one_pass):
            own = trial(*ROUNDS["rabo mixed, Table 1"])
            reached[one_pass] = []
            for _ in range(5):
                own.round()
                values = own.state.x.values()
                reached[one_pass].append(torch.cat([v.reshape(-1) for v in values]).double())
    gaps = [(a - b).norm() / b.norm() for a, b in zip(*reached.values(), strict=True)]
    return {"after_1_round": float(gaps[0]), "after_5_rounds": float(gaps[-1])}


def main(out: str, *parts: str) -> None:
    found: dict[str, Any] = {
        "what": "rounds in turn, medians of 15 after 6 that are not counted (ms, the least, and "
        "the median over turns of the time over FedMBO's); the same recordings replayed at once, "
        f"without the round around them, medians of {REPLAYS} (ms for all, of that to launch them, "
        "and ms for each alone); with support sets and queries in one pass or in two",
        "setting": "ResNet-12, ten clients, four 5-way 1-shot tasks each, glyphs; "
        f"{WIDE} channels, where Table 1 is said {TABLE_1}; mixed: capacities {CAPACITIES}",
        "command": f"python -m benchmarks replays OUT.json {' '.join(parts)}".strip(),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
        "difference_of_x": difference(),
        "rows": [],
    }
    print(found["difference_of_x"], flush=True)
    asked = [n for n in ROUNDS if any(part in n for part in parts or [""])]
    wide = [name for name in asked if "Table 1" not in name]
    for one_pass in (True, False):
        for names in (wide, [name for name in asked if name not in wide]):
            rows = measure(names, one_pass) if names else []
            found["rows"] += rows
            for row in rows:
                print(row, flush=True)
            Path(out).write_text(json.dumps(found, indent=1) + "\n")
