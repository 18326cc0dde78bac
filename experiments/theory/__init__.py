"""Measure the claims of the paper's theory on problems with closed forms.

Each measurement is a file with a frozen result, `measure_...` and `draw_...`. The `holds` property
of a result lists the claims with the outcome of each.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.theory.bias import Bias, draw_bias, measure_bias
from experiments.theory.contraction import Contraction, draw_contraction, measure_contraction
from experiments.theory.differences import Differences, draw_differences, measure_differences
from experiments.theory.rate import Rate, draw_rate, measure_rate
from rabo.runs.plots import figure_class

MEASUREMENTS: dict[str, tuple[Callable[..., Any], Callable[[Any, Path], None]]] = {
    "contraction": (measure_contraction, draw_contraction),
    "differences": (measure_differences, draw_differences),
    "rate": (measure_rate, draw_rate),
    "bias": (measure_bias, draw_bias),
}


def run_theory(
    out: Path, *, quick: bool, seed: int, report: Callable[[str], None]
) -> dict[str, Any]:
    """Run all measurements; write out/theory.json and one figure for each."""
    figure_class()  # a missing matplotlib is an error before the measurements
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"quick": quick, "seed": seed}
    for name, (measure, draw) in MEASUREMENTS.items():
        found = measure(quick=quick, seed=seed)
        draw(found, out / f"{name}.svg")
        results[name] = {**asdict(found), "holds": found.holds}
        (out / "theory.json").write_text(json.dumps(results, indent=1))
        report(f"{name}: {found}")
        for claim, held in found.holds.items():
            report(f"  {'yes' if held else 'NO '}  {claim}")
    return results


def main(words: Sequence[str]) -> int:
    """Run the measurements from the command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments theory", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/theory"), help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and seeds")
    parser.add_argument("--seed", type=int, default=0, help="seed of all draws (%(default)s)")
    args = parser.parse_args(words)
    run_theory(args.out, quick=args.quick, seed=args.seed, report=print)
    print(f"figures and numbers: {args.out}")
    return 0


__all__ = [
    "MEASUREMENTS",
    "Bias",
    "Contraction",
    "Differences",
    "Rate",
    "main",
    "measure_bias",
    "measure_contraction",
    "measure_differences",
    "measure_rate",
    "run_theory",
]
