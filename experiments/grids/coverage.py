"""The number of clients that train an entry: the paper's figure on C*_x."""

from experiments.grid import Grid, Setting, merge, restrict
from experiments.grids.few_shot import BASE, BOTH_HEADS, METHODS
from experiments.grids.tuned import FIVE_WAY


def segments(coverage: int, *assignment: int) -> Setting:
    """Return the setting in which client i trains segment assignment[i] of the importance order."""
    policy = {"name": "segments", "num_segments": 4, "assignment": list(assignment)}
    return Setting(
        label=f"C*_x = {coverage}",
        run={"algorithm_options": {"policy": policy}},
        coverage={"x_min": coverage},
    )


COVERAGE = Grid(
    name="figure-coverage",
    title="How many clients train an entry",
    base=merge(BASE, {"capacities": "1/4", "task_options": {"ways": 5, "shots": 5}}),
    settings={
        "coverage-1": segments(1, 0, 1, 2, 3, 0, 0, 0, 0, 0, 0),
        "coverage-2": segments(2, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1),
    },
    methods=restrict(METHODS, BOTH_HEADS),
    tuned=FIVE_WAY,
)
