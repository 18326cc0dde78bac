"""The paper's theory, measured: what holds, how tightly, and what does not.

Every measurement is a file with a frozen result, `measure_...` and `draw_...`; `run_theory` runs
them all. A result says in `holds` which claims it bears out.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rabo.runs.plots import figure_class
from rabo.theory.bias import Bias, draw_bias, measure_bias
from rabo.theory.contraction import Contraction, draw_contraction, measure_contraction
from rabo.theory.differences import Differences, draw_differences, measure_differences
from rabo.theory.rate import Rate, draw_rate, measure_rate

MEASUREMENTS: dict[str, tuple[Callable[..., Any], Callable[[Any, Path], None]]] = {
    "contraction": (measure_contraction, draw_contraction),
    "differences": (measure_differences, draw_differences),
    "rate": (measure_rate, draw_rate),
    "bias": (measure_bias, draw_bias),
}


def run_theory(
    out: Path, *, quick: bool, seed: int, report: Callable[[str], None]
) -> dict[str, Any]:
    """Measure everything; write out/theory.json and a figure per measurement."""
    figure_class()  # what is missing should be said before the measurements, not after
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"quick": quick, "seed": seed}
    for name, (measure, draw) in MEASUREMENTS.items():
        found = measure(quick=quick, seed=seed)
        draw(found, out / f"{name}.png")
        results[name] = {**asdict(found), "holds": found.holds}
        (out / "theory.json").write_text(json.dumps(results, indent=1))
        report(f"{name}: {found}")
        for claim, held in found.holds.items():
            report(f"  {'yes' if held else 'NO '}  {claim}")
    return results


__all__ = [
    "MEASUREMENTS",
    "Bias",
    "Contraction",
    "Differences",
    "Rate",
    "measure_bias",
    "measure_contraction",
    "measure_differences",
    "measure_rate",
    "run_theory",
]
