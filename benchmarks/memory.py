"""Second-order-free against second-order rounds where y is a deep net: RAFBO and RABO.

Loss tuning on random images, with the options that the task gives both. The outer batch is drawn
from what a client has for validation: four times as many images as the task takes, or as many.
"""

from dataclasses import replace
from typing import Any

import torch

from benchmarks.parts.machine import Machine
from benchmarks.parts.report import Finding, Target
from benchmarks.parts.timing import Setting, interleave, milliseconds, ratio
from benchmarks.parts.trial import Trial
from rabo.exchange.cost import measure as meter
from rabo.hypergradients.linearisation import LINEARISATIONS, View
from rabo.problems.problem import ClientProblem
from rabo.runs.experiment import Experiment
from rabo.tasks.loss_tuning import BATCH, LossTuningTask

TIME, MEMORY = 1.0, 0.6  # of RABO's
WIDTH = 0.5
NUM_CLASSES, NUM_STEPS = 10, 5
OUTER = (4 * BATCH, BATCH)  # images of an outer batch
CLASSIFIERS = {"two convolutions, 8x8": (1, 8, 16), "ResNet-18 from 16, 32x32": (3, 32, 16)}


def measure(setting: Setting, machine: Machine) -> Finding:
    rows, targets = [], []
    for name in list(CLASSIFIERS)[: 1 if setting.quick else None]:
        for outer in OUTER:
            found = compare(name, outer, setting)
            rows += found
            about = f"{name}, {outer} outer images: RAFBO over RABO,"
            targets.append(Target(f"{about} time", found[1]["x RABO's time"], TIME))
            targets.append(Target(f"{about} memory", found[1]["x RABO's peak"], MEMORY))
    note = (
        "a peak is that of a client's live tensors; ∇f is its part of the outer batch, ∇²g·v that "
        f"of products on {BATCH} images of the inner batch"
    )
    return Finding(rows, targets, [note])


def compare(name: str, num_outer: int, setting: Setting) -> list[dict[str, Any]]:
    """Time both algorithms' rounds in turn, and take their peaks apart."""
    problem = client(name, num_outer, setting)
    trials = {
        algorithm.upper(): Trial({0: problem}, {0: WIDTH}, tuned(algorithm, setting))
        for algorithm in ("rabo", "rafbo")
    }
    times = interleave({k: t.round for k, t in trials.items()}, setting, 9)
    peaks = {name: trial.peaks() for name, trial in trials.items()}
    largest = {name: max(found.values()) for name, found in peaks.items()}
    return [
        {
            "classifier": name,
            "outer images": num_outer,
            "algorithm": algorithm,
            "ms": milliseconds(times[algorithm]),
            "x RABO's time": ratio(times[algorithm], times["RABO"]),
            "peak MB": largest[algorithm],
            "x RABO's peak": largest[algorithm] / largest["RABO"],
            **{f"{phase} MB": value for phase, value in peaks[algorithm].items()},
            **parts(problem, trial),
        }
        for algorithm, trial in trials.items()
    ]


def client(name: str, num_outer: int, setting: Setting) -> ClientProblem:
    """Return a client with random images."""
    channels, size, width = CLASSIFIERS[name]
    task = LossTuningTask(width=4 if setting.quick else width, outer_batch=num_outer)
    counts = torch.full((NUM_CLASSES,), 100.0, device=setting.device)
    generator = torch.Generator().manual_seed(0)

    def images(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = torch.randint(256, (number, channels, size, size), generator=generator)
        labels = torch.arange(number) % NUM_CLASSES
        return pixels.to(setting.device, torch.uint8), labels.to(setting.device)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        problem = task.problem(channels, counts, setting.device)
    return problem.on(inner=images(2 * BATCH), outer=images(num_outer))


def tuned(algorithm: str, setting: Setting) -> Any:
    """Return an algorithm with the options of the task, without its warm-up."""
    experiment = Experiment(
        task="loss-tuning", algorithm=algorithm, clients=1, device=setting.device
    )
    federation, _ = experiment.federation()
    return replace(federation.algorithm, warm_up=0, num_inner_steps=NUM_STEPS)  # type: ignore[type-var]


def parts(problem: ClientProblem, trial: Trial) -> dict[str, float]:
    """Megabytes of the two halves of a hypergradient, each on its own."""
    cut = next(iter(trial.cuts().values()))
    x, y = cut.x.extract(trial.state.x), cut.y.extract(trial.state.y)
    own = problem.restrict(cut)
    view = View(own, x, y, own.batch(torch.Generator().manual_seed(0)))
    system = LINEARISATIONS[trial.algorithm.hypergradient.products](view)  # type: ignore[attr-defined]
    _, outer = meter(lambda: view.outer_slopes(view.y))
    v = torch.ones_like(view.y)
    _, product = meter(lambda: system.product(v))
    return {
        "∇f MB": outer.peak_memory_bytes / 1e6,
        "∇²g·v MB": product.peak_memory_bytes / 1e6,
    }
