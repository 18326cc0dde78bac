"""Estimators of hypergradients, asked during training with RABO."""

from collections.abc import Mapping
from typing import Any

from experiments.grid import Grid, Method, Setting

WATCHED = (1, 20, 40)  # rounds
REFERENCE = "CG, 10 steps"
ESTIMATED: Mapping[str, Mapping[str, Any]] = {
    "CG, 5 steps": {"name": "conjugate-gradient", "num_iterations": 5},
    "CG, 10 steps": {"name": "conjugate-gradient", "num_iterations": 10},
    "CG, 20 steps": {"name": "conjugate-gradient", "num_iterations": 20},
    "Neumann, 10 terms": {"name": "neumann", "num_terms": 10},
    "Neumann, 50 terms": {"name": "neumann", "num_terms": 50},
    "unrolled, 20 steps": {"name": "unrolled", "num_steps": 20},
    "directional difference": {"name": "directional-difference", "num_iterations": 10},
    "coordinate difference": {"name": "coordinate-difference", "num_iterations": 10},
    "Algorithm 2 as printed": {"name": "literal-coordinate-difference"},
}
ESTIMATORS = Grid(
    name="study-estimators",
    title="Hypergradients against the dense solution during training",
    base={
        "task": "few-shot",
        "task_options": {
            "dataset": "glyphs",
            "backbone": "conv4",
            "channels": "6",
            "queries": 5,
            "tasks": 2,
            "test_tasks": 100,
        },
        "algorithm": "rabo",
        "clients": 2,
        "capacities": "1,1/2",
        "rounds": 40,
        "evaluate_every": 40,
    },
    settings={"glyphs": Setting(label="glyphs")},
    methods={"rabo": Method(label="RABO", run={})},
)
