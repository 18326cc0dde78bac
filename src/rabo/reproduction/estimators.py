"""The error of every hypergradient against the dense one, where training asks for it."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Generator

from rabo.exchange.cost import measure
from rabo.hypergradients import ESTIMATORS, Estimate, HypergradientEstimator
from rabo.hypergradients.linearisation import Exact, View
from rabo.problems.bilevel import Batch, BilevelProblem
from rabo.reproduction.grid import Changes, Grid, Run
from rabo.reproduction.literal import register
from rabo.reproduction.sweep import differences
from rabo.runs.experiment import Experiment
from rabo.runs.plots import COLOURS, label, new_figure, save
from rabo.runs.record import versions
from rabo.tree import Params, flatten, leaves, map_leaves

MARKERS = "osD^v<>Pv*X"


@dataclass(frozen=True)
class Watched:
    """An estimator that lets somebody look at every point it is asked at, and changes nothing."""

    estimator: HypergradientEstimator
    look: Callable[[BilevelProblem, Params, Params, Batch], None]

    def __call__(
        self,
        problem: BilevelProblem,
        x: Params,
        y: Params,
        batch: Batch,
        generator: Generator | None = None,
    ) -> Estimate:
        self.look(problem, x, y, batch)
        return self.estimator(problem, x, y, batch, generator)


def dense_hypergradient(problem: BilevelProblem, x: Params, y: Params, batch: Batch) -> Params:
    """∇_x f − ∇²_xy g [∇²_yy g]⁻¹ ∇_y f in float64, with the Hessian written out."""
    x, y, batch = (_double(each) for each in (x, y, batch))
    system = Exact(View(problem, x, y, batch))
    rhs = system.rhs  # a row per copy of y, whose blocks of the Hessian are solved apart
    unit = torch.eye(rhs.shape[1], dtype=rhs.dtype, device=rhs.device)
    columns = [system.product(e.expand_as(rhs)) for e in unit]
    hessian = torch.stack(columns, dim=2)
    return system.pull_back(torch.linalg.solve(hessian, rhs.unsqueeze(2)).squeeze(2))


def _double(tree: Any) -> Any:
    return map_leaves(lambda t: t.double() if t.is_floating_point() else t, tree)


def measure_estimators(
    grid: Grid,
    runs: Sequence[Run],
    out: Path,
    *,
    limit: float | None = None,
    say: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Train and look at the rounds that are named; return how many runs the time limit left.

    A seed is a file below `out`.
    """
    begun, left, folder = clock(), 0, out / grid.name
    for run in runs:
        path = folder / f"seed-{run.experiment.seed}.json"
        if path.exists():
            continue
        if limit is not None and clock() - begun > limit:
            left += 1
            continue
        # plain: a recorded round would not call the one who watches
        experiment = replace(run.experiment, runtime="plain")
        rows, metrics = _train(experiment, grid.content)
        found = {"experiment": experiment.config(), "versions": versions()}
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**found, "metrics": metrics, "rows": rows}, indent=1) + "\n")
        say(f"{run.name}: {len(rows)} estimates, accuracy {metrics['accuracy']:.4f}")
    return left


def _train(
    experiment: Experiment, content: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], Mapping[str, float]]:
    federation, _ = experiment.federation()
    algorithm: Any = federation.algorithm
    register()
    estimators = {
        name: ESTIMATORS[options["name"]](**{k: v for k, v in options.items() if k != "name"})
        for name, options in content["estimators"].items()
    }
    rows: list[dict[str, Any]] = []

    def look(problem: BilevelProblem, x: Params, y: Params, batch: Batch) -> None:
        number = federation.state.round + 1
        if number not in content["watched"]:
            return
        truth = flatten(leaves(dense_hypergradient(problem, x, y, batch)))
        for name, estimator in estimators.items():
            found, cost = measure(lambda e=estimator: e(problem, x, y, batch))
            value = flatten(leaves(_double(found.value)))
            rows.append(
                {
                    "estimator": name,
                    "round": number,
                    "parameters": truth.numel(),
                    "error": float((value - truth).norm() / truth.norm()),
                    "cosine": float((value * truth).sum() / value.norm() / truth.norm()),
                    "evaluations": found.evaluations,
                    "multiply_adds": cost.multiply_adds,
                }
            )

    federation.algorithm = replace(algorithm, hypergradient=Watched(algorithm.hypergradient, look))
    metrics: dict[str, float] = {}
    for done in federation.run(experiment.rounds):
        metrics |= done.metrics
    return rows, metrics


def read_rows(grid: Grid, out: Path, changes: Changes | None = None) -> list[dict[str, Any]]:
    """Return the estimates of all seeds; files that tell of another experiment are refused."""
    rows = []
    for path in sorted((out / grid.name).glob("seed-*.json")):
        found, seed = json.loads(path.read_text()), int(path.stem.removeprefix("seed-"))
        run = grid.runs(replace(changes or Changes(), seeds=seed + 1, only=()))[-1]
        other = differences(run, found.get("experiment", run.experiment.config()))
        if other:
            raise ValueError(
                f"{path} was measured with another {', '.join(other)}; remove it and run "
                f"`rabo reproduce {grid.name}` again, or give the options that it was run with"
            )
        rows += found["rows"]
    return rows


def estimators_table(grid: Grid, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a row per estimator: error by round, cosine, and what it costs."""
    watched = sorted({row["round"] for row in rows})
    lines = [
        ["estimator", *(f"round {round}" for round in watched), "cosine", "gradients", "work"],
    ]
    lines.append(["---"] * len(lines[0]))
    reference = _mean(rows, grid.content["reference"], "multiply_adds")
    for name in grid.content["estimators"]:
        errors = [f"{_mean(rows, name, 'error', round):.1e}" for round in watched]
        cosine = _mean(rows, name, "cosine")
        gradients = _mean(rows, name, "evaluations")
        work = _mean(rows, name, "multiply_adds") / reference
        lines.append([name, *errors, f"{cosine:.4f}", f"{gradients:,.0f}", f"{work:.2f}"])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (
        f"{table}\n\nRelative error against the dense float64 hypergradient of the same batch, "
        "mean over seeds and clients (full width and 1/2); gradients of f or g that one estimate "
        "takes; "
        f"work: multiply-adds relative to {grid.content['reference']}."
    )


def _mean(
    rows: Sequence[Mapping[str, Any]], name: str, what: str, round: int | None = None
) -> float:
    return fmean(
        row[what]
        for row in rows
        if row["estimator"] == name and (round is None or row["round"] == round)
    )


def draw_estimators(grid: Grid, rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the error against rounds, and against what an estimate takes."""
    figure, (by_round, by_cost) = new_figure(2)
    watched = sorted({row["round"] for row in rows})
    for i, name in enumerate(grid.content["estimators"]):
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        errors = [_mean(rows, name, "error", round) for round in watched]
        by_round.plot(watched, errors, color=colour, marker=marker, linewidth=1, label=name)
        cost = _mean(rows, name, "evaluations")
        by_cost.plot([cost], [fmean(errors)], color=colour, marker=marker, ls="", label=name)
    label(by_round, "during training", "round", "relative error", "linear-log")
    label(by_cost, "for what it costs", "gradients of f or g", "relative error")
    save(figure, path)
