"""Rounds of few-shot learning: RABO on unequal clients against the full model, and by width."""

from dataclasses import replace

from benchmarks.parts.machine import Machine
from benchmarks.parts.report import Finding, Target
from benchmarks.parts.timing import Setting, interleave, milliseconds, ratio
from benchmarks.parts.trial import trial_of
from rabo.errors import lookup
from rabo.runs.experiment import Experiment

CAPACITIES = "1,1/2,1/4,1/8,1/16"
MIXED, FULL, FEDMBO = f"rabo at {CAPACITIES}", "rabo at 1", "fedmbo at 1"
AGAINST_FULL, AGAINST_FEDMBO = 0.35, 0.40  # the first on a CPU, the second on a GPU
H200_MS = {MIXED: 60.0, FEDMBO: 160.0}  # of ResNet-12 with its usual channels


def few_shot(setting: Setting, **options: str) -> Experiment:
    """Ten clients with four 5-way 1-shot tasks each."""
    size = {"channels": setting.channels}
    if setting.quick:
        narrow = lookup("backbone", setting.backbone, {"conv4": "4", "resnet12": "4,4,4,4"})
        size = {"channels": setting.channels or narrow, "queries": 1, "tasks": 2}
    return Experiment(
        task="few-shot",
        task_options={"backbone": setting.backbone, **size},
        clients=10,
        device=setting.device,
        **options,  # type: ignore[arg-type]
    )


def measure(setting: Setting, machine: Machine) -> Finding:
    """Time rounds of all kinds in turn, as a run has them, and take the peaks of one client."""
    kinds = {MIXED: ("rabo", CAPACITIES), FEDMBO: ("fedmbo", "1")}
    widths = ["1", "1/16"] if setting.quick else CAPACITIES.split(",")
    kinds |= {f"rabo at {width}": ("rabo", width) for width in widths}
    experiments = {
        name: few_shot(setting, algorithm=algorithm, capacities=capacities)
        for name, (algorithm, capacities) in kinds.items()
    }
    trials = {name: trial_of(experiment) for name, experiment in experiments.items()}
    work = {name: trial.round for name, trial in trials.items()}
    # work is measured in the first round, recorded in the second, and replayed from then on
    times = interleave(work, setting, 5, warmup=1 if setting.device == "cpu" else 3)
    rows = []
    for name, trial in trials.items():
        on_cpu = setting.device == "cpu"  # elsewhere rounds are replayed, and no kernel is seen
        eager = trial if on_cpu else trial_of(replace(experiments[name], runtime="plain"))
        rows.append(
            {
                "round": name,
                "ms": milliseconds(times[name]),
                "x rabo at 1": ratio(times[name], times[FULL]),
                "x fedmbo": ratio(times[name], times[FEDMBO]),
                "rounds per second": 1000 / milliseconds(times[name]),
                **machine.floors(eager.round),
                "peak MB of a client": max(trial.peaks().values()),
            }
        )
    against, limit = (FULL, AGAINST_FULL) if setting.device == "cpu" else (FEDMBO, AGAINST_FEDMBO)
    value = ratio(times[MIXED], times[against])
    targets = [Target(f"{setting.backbone}: {MIXED} over {against}", value, limit)]
    if (
        "H200" in machine.facts["device"]
        and setting.backbone == "resnet12"
        and not setting.channels
    ):
        targets += [Target(f"{n}, ms", milliseconds(times[n]), most) for n, most in H200_MS.items()]
    clients = len(trials[MIXED].cohort.widths)
    backbone = f"{setting.backbone} {setting.channels}".strip()
    return Finding(rows, targets, [f"{backbone}, {clients} clients, 5-way 1-shot"])
