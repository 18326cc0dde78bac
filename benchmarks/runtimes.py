"""Clients' work as it comes, recorded once and replayed, and equal clients as one."""

from benchmarks.parts.machine import Machine
from benchmarks.parts.report import Finding, Target
from benchmarks.parts.timing import Setting, interleave, milliseconds, ratio
from benchmarks.parts.trial import trial_of
from benchmarks.rounds import CAPACITIES, few_shot
from rabo.tree import leaves

ON_A_CPU = "on a CPU a recording is only work that is run again: the ratio says what that costs"


def measure(setting: Setting, machine: Machine) -> Finding:
    """Time the same rounds on all runtimes in turn; they must reach the same x."""
    rows, targets = [], []
    for algorithm, capacities in (("rabo", CAPACITIES), ("fedmbo", "1")):
        trials = {
            name: trial_of(
                few_shot(setting, algorithm=algorithm, capacities=capacities, runtime=name)
            )
            for name in ("plain", "recorded", "grouped")
        }
        # the third round is the first in which everything is replayed
        times = interleave({k: t.round for k, t in trials.items()}, setting, 5, warmup=3)
        x = {name: leaves(trial.state.x) for name, trial in trials.items()}
        for name in trials:
            pairs = zip(x[name], x["plain"], strict=True)
            rows.append(
                {
                    "round": f"{algorithm} at {capacities}",
                    "runtime": name,
                    "ms": milliseconds(times[name]),
                    "x plain": ratio(times[name], times["plain"]),
                    "largest difference in x": max(float((a - b).abs().max()) for a, b in pairs),
                }
            )
        if setting.device != "cpu":
            targets.append(Target(f"{algorithm}: grouped over plain", rows[-1]["x plain"], 1.0))
    return Finding(rows, targets, [ON_A_CPU] if setting.device == "cpu" else [])
