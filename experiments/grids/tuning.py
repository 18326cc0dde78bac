"""Candidates for the options of every method, judged on held-out data of training alphabets.

Each method is a setting of these grids and its candidates are the methods there. All methods have
equally many candidates.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.grid import Grid, Method, Options, Setting, describe, merge
from experiments.grids import few_shot, loss_tuning

Candidates = Mapping[str, Sequence[Options]]  # by kind of method

FIVE_WAY: Candidates = {
    "bilevel": [
        {"alpha": 0.3},
        {"alpha": 1.0},
        {"outer_step": "adam", "alpha": 0.001},
        {"outer_step": "adam", "alpha": 0.003},
    ],
    "single-level": [
        {"beta": 10.0, "beta_x": 0.1, "num_inner_steps": 5},
        {"beta": 30.0, "beta_x": 0.1, "num_inner_steps": 5},
        {"beta": 30.0, "beta_x": 0.03, "num_inner_steps": 5},
        {"beta": 10.0, "beta_x": 0.03, "num_inner_steps": 5},
    ],
    "single-level-shared": [
        {"beta": 0.1, "num_inner_steps": 5},
        {"beta": 1.0, "beta_x": 0.1, "num_inner_steps": 5},
        {"beta": 10.0, "beta_x": 0.1, "num_inner_steps": 5},
        {"beta": 10.0, "beta_x": 0.03, "num_inner_steps": 5},
    ],
    "prototypes": [
        {"beta": 0.03, "num_inner_steps": 1},
        {"beta": 0.03, "num_inner_steps": 3},
        {"beta": 0.01, "num_inner_steps": 3},
        {"beta": 0.1, "num_inner_steps": 3},
    ],
    "adaptation": [
        {"beta": 1.0, "adapt_rate": 0.5, "num_inner_steps": 1},
        {"beta": 0.3, "adapt_rate": 5.0, "adapt_rate_x": 0.1, "num_inner_steps": 1},
        {"beta": 1.0, "adapt_rate": 5.0, "adapt_rate_x": 0.1, "num_inner_steps": 1},
        {"beta": 1.0, "adapt_rate": 5.0, "adapt_rate_x": 0.5, "num_inner_steps": 1},
    ],
}
TWENTY_WAY: Candidates = {
    "bilevel": [
        {"alpha": 0.1},
        {"alpha": 0.3},
        {"alpha": 1.0},
        {"outer_step": "adam", "alpha": 0.001},
    ],
    "single-level": [
        {"beta": 30.0, "beta_x": 0.1, "num_inner_steps": 5},
        {"beta": 100.0, "beta_x": 0.1, "num_inner_steps": 5},
        {"beta": 100.0, "beta_x": 0.03, "num_inner_steps": 5},
        {"beta": 30.0, "beta_x": 0.1, "num_inner_steps": 10},
    ],
    "single-level-shared": FIVE_WAY["single-level-shared"],
    "prototypes": FIVE_WAY["prototypes"],
    "adaptation": [
        {"beta": 0.3, "adapt_rate": 20.0, "adapt_rate_x": 0.1, "num_inner_steps": 1},
        {"beta": 1.0, "adapt_rate": 20.0, "adapt_rate_x": 0.1, "num_inner_steps": 1},
        {"beta": 1.0, "adapt_rate": 20.0, "adapt_rate_x": 0.5, "num_inner_steps": 1},
        {"beta": 1.0, "adapt_rate": 30.0, "adapt_rate_x": 0.1, "num_inner_steps": 1},
    ],
}
LOSS: Candidates = {
    "bilevel": [
        {"alpha": 0.05},
        {"alpha": 0.02},
        {"beta": {"name": "cosine", "start": 0.1}, "alpha": 0.05},
    ],
    "single-level": [
        {"beta": {"name": "cosine", "start": 0.05}, "momentum": 0.9},
        {"beta": {"name": "cosine", "start": 0.02}, "momentum": 0.9},
        {"beta": {"name": "cosine", "start": 0.1}, "momentum": 0.9},
    ],
}
KINDS = {
    "dist-protonet": "prototypes",
    "dist-maml": "adaptation",
    "fedavg": "single-level",
    "static": "single-level",
    "oap": "single-level",
    "fedrolex": "single-level",
    "fiarse": "single-level",
    "static-shared": "single-level-shared",
    "oap-shared": "single-level-shared",
    "fedrolex-shared": "single-level-shared",
    "fiarse-shared": "single-level-shared",
}  # all others are bilevel


def tuning(
    name: str, title: str, base: Options, methods: Mapping[str, Method], candidates: Candidates
) -> Grid:
    """Return the grid of all candidates, 40 rounds and one seed each."""

    def column(name: str, method: Method) -> Setting:
        tried = candidates[KINDS.get(name, "bilevel")]
        rows = {
            f"candidate-{i}": Method(label=describe(own), run={"algorithm_options": own})
            for i, own in enumerate(tried, start=1)
        }
        return Setting(label=method.label, run=method.run, methods=rows)

    settings = {name: column(name, method) for name, method in methods.items()}
    return Grid(
        name=name, title=title, base=merge(base, {"rounds": 40}), settings=settings, seeds=1
    )


def held_out(**options: Any) -> Options:
    """Return the task options of a tuning on alphabets held out of training."""
    return {"task_options": {"held_out": "validation", "shots": 1, "test_tasks": 200, **options}}


TUNING_5_WAY = tuning(
    "tuning-few-shot",
    "Options for few-shot, chosen at 5-way 1-shot on held-out training alphabets",
    merge(few_shot.BASE, held_out(ways=5)),
    few_shot.METHODS,
    FIVE_WAY,
)
TUNING_20_WAY = tuning(
    "tuning-few-shot-20",
    "Options for few-shot, chosen at 20-way 1-shot on held-out training alphabets",
    merge(few_shot.BASE, held_out(ways=20, queries=5)),
    few_shot.METHODS,
    TWENTY_WAY,
)
TUNING_LOSS = tuning(
    "tuning-loss",
    "Options for loss tuning, chosen on half of the clients' validation data",
    merge(loss_tuning.BASE, {"task_options": {"held_out": "aside"}}),
    {name: loss_tuning.METHODS[name] for name in ("fedavg", "fedmbo")},
    LOSS,
)
