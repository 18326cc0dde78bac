"""The paper as printed against its corrected form: see docs/errata.md."""

from typing import Any

from experiments.grid import Grid, Method, Setting
from experiments.grids.studies import GLYPHS

QUADRATIC = {"task": "quadratic", "clients": 10, "rounds": 200}
LONG_TAILED = {"task": "loss-tuning", "algorithm": "rabo", "capacities": "1/2", "rounds": 40}


def pair(
    label: str,
    printed: dict[str, Any] | None,
    corrected: dict[str, Any],
    where: str = "algorithm_options",
    **run: Any,
) -> Setting:
    """Return a setting with the printed form, if it differs, beside the corrected one."""
    methods = {}
    if printed is not None:
        methods["literal"] = Method(label="as printed", run={where: printed})
    methods["corrected"] = Method(label="corrected", run={where: corrected})
    return Setting(label=label, run=run, methods=methods)


LITERAL = {"hypergradient": "literal-coordinate-difference"}
CORRECTED = {"hypergradient": "coordinate-difference"}
ERRATA = Grid(
    name="study-errata",
    title="The paper as printed against its corrected form",
    base={"task": "digits", "clients": 4, "rounds": 30},
    settings={
        "erratum-2": pair(
            "2: Algorithm 2 (digits, 8 hidden units)",
            LITERAL,
            CORRECTED,
            algorithm="rafbo",
            rounds=20,
            task_options={"width": 8},
        ),
        "erratum-2-quadratic": pair(
            "2: Algorithm 2 (quadratic, ‖∇Φ‖ at the end)",
            LITERAL,
            CORRECTED,
            algorithm="rafbo",
            **QUADRATIC,
        ),
        "erratum-5": pair(
            "5: β = 1/(NTQ), or measured (digits)",
            {"num_inner_steps": 20, "beta": 4.1667e-4},
            {"num_inner_steps": 20},
            algorithm="rabo",
            capacities="1,1/2,1/4,1/8",
        ),
        "erratum-6": pair(
            "6: local or global Hessian (quadratic, ‖∇Φ‖ at the end)",
            {"hessian": "local"},
            {"hessian": "global"},
            algorithm="rabo",
            **QUADRATIC,
        ),
        "erratum-7": pair(
            "7: one head, or a head per task (glyphs, 5-way 1-shot)",
            {"heads": "shared"},
            {"heads": "per-task"},
            "task_options",
            algorithm="rabo",
            **GLYPHS,
        ),
        "erratum-8": pair(
            "8: the upper level is the tuned loss, or a balanced one (long-tailed digits)",
            {"upper": "literal"},
            {"upper": "balanced"},
            "task_options",
            **{**LONG_TAILED, "capacities": "1"},
        ),
        "erratum-10": pair(
            "10: the full model (in brackets), or the entries ever trained "
            "(long-tailed digits, width 1/2)",
            None,
            {},
            **LONG_TAILED,
        ),
        "erratum-13": pair(
            "13: masks by importance in every round, or fixed (long-tailed digits, width 1/2)",
            {"policy": "importance"},
            {"policy": "static"},
            **LONG_TAILED,
        ),
    },
    settings_are_rows=True,
)
