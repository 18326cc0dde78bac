"""Compare each estimator with the dense hypergradient at points of a training run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Generator

from experiments.grid import Run
from experiments.grids.estimators import ESTIMATED, WATCHED
from experiments.records import Record
from experiments.runner import StopBetweenRounds
from experiments.theory.literal import register
from rabo.exchange.cost import measure
from rabo.hypergradients import ESTIMATORS, Estimate, HypergradientEstimator
from rabo.hypergradients.linearisation import Exact, View
from rabo.problems.bilevel import Batch, BilevelProblem
from rabo.runs.record import versions
from rabo.tree import Params, flatten, leaves, map_leaves


@dataclass(frozen=True)
class Watched(HypergradientEstimator):
    """Wrap an estimator: call `look` at each point where training asks for a hypergradient."""

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


def measure_estimators(run: Run, out: Path) -> Record:
    """Train, and compare all estimators in the rounds of `WATCHED`; `out` is not used."""
    # the plain runtime calls the wrapped estimator in every round
    experiment = replace(run.experiment, runtime="plain")
    federation, setup = experiment.federation()
    algorithm: Any = federation.algorithm
    rows: list[dict[str, Any]] = []

    def look(problem: BilevelProblem, x: Params, y: Params, batch: Batch) -> None:
        number = federation.state.round + 1
        if number in WATCHED:
            rows.extend({"round": number, **row} for row in compare(problem, x, y, batch))

    federation.algorithm = replace(algorithm, hypergradient=Watched(algorithm.hypergradient, look))
    metrics: dict[str, float] = {}
    watch = StopBetweenRounds()
    for done in federation.run(experiment.rounds):
        metrics |= done.metrics
        watch.add(done)
    about = {"setting": run.setting, "method": run.method, "seed": run.seed}
    ended = datetime.now(UTC).isoformat(timespec="seconds")
    return Record(
        {
            **about,
            "status": "finished",
            "headline": setup.headline,
            "metrics": metrics,
            "rows": rows,
            "versions": versions(),
            "ended": ended,
            "config": experiment.config(),
        }
    )


def compare(
    problem: BilevelProblem, x: Params, y: Params, batch: Batch
) -> Iterator[dict[str, Any]]:
    """Yield the error, cosine and cost of each estimator at one point."""
    register()
    truth = flatten(leaves(dense_hypergradient(problem, x, y, batch)))
    for name, options in ESTIMATED.items():
        own = {option: value for option, value in options.items() if option != "name"}
        estimator = ESTIMATORS[options["name"]](**own)
        found, cost = measure(lambda e=estimator: e(problem, x, y, batch))
        value = flatten(leaves(_double(found.value)))
        yield {
            "estimator": name,
            "parameters": truth.numel(),
            "error": float((value - truth).norm() / truth.norm()),
            "cosine": float((value * truth).sum() / value.norm() / truth.norm()),
            "evaluations": found.evaluations,
            "multiply_adds": cost.multiply_adds,
        }
