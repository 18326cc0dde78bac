"""`python -m experiments tables`: refresh the tables of pages, and the figures, from the records.

In a page, the text between `<!-- table NAME -->` and `<!-- end -->` is replaced.
"""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from experiments import views
from experiments.grids import GRIDS
from experiments.views import Results

PLACE = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
PAGES = ("docs/results.md", "results/*/README.md")
TABLES: Mapping[str, Callable[[Results], str]] = {
    "table-1-per-task": partial(views.table_1, shared=False),
    "table-1-shared": partial(views.table_1, shared=True),
    "table-2-per-task": partial(views.table_2, shared=False),
    "table-2-shared": partial(views.table_2, shared=True),
    "costs": views.costs,
    "costs-tuning": views.costs_tuning,
    "within-multiply-adds": partial(views.within, cost="multiply_adds"),
    "within-bytes": partial(views.within, cost="bytes"),
    "rabo-over-others": views.rabo_over_others,
    "ahead-of-others": views.ahead_of_others,
    "capacities-omniglot": views.capacities_omniglot,
    "dirichlet-omniglot": views.dirichlet_omniglot,
    "compare-digits": views.compare_digits,
    **{f"runs-{name}": partial(views.facts, name=name) for name in GRIDS},
    **{name: partial(views.own_table, name=name) for name in GRIDS},
}
FIGURES: Mapping[str, Callable[[Results, Path], None]] = {  # by file below results/
    "table-1/rounds.svg": views.draw_rounds,
    "table-1/work.svg": views.draw_work,
    "table-1/cost.svg": views.draw_table_1_costs,
    "figure-coverage/rounds.svg": views.draw_coverage,
    "figure-tuning/rounds.svg": views.draw_tuning,
    "figure-tuning/cost.svg": views.draw_tuning_costs,
    "study-longer/rounds.svg": views.draw_longer,
    "study-estimators/errors.svg": views.draw_errors,
    "compare-digits/results.svg": views.draw_digits,
}


def fill(text: str, results: Results) -> str:
    """Return a page with its tables made anew; raise KeyError for an unknown table."""
    return PLACE.sub(lambda found: f"{found[1]}{TABLES[found[2]](results)}\n{found[3]}", text)


def main(words: Sequence[str]) -> int:
    """Refresh all pages and figures of a checkout."""
    parser = argparse.ArgumentParser(prog="python -m experiments tables", description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout (%(default)s)")
    args = parser.parse_args(words)
    results = Results(args.root / "results")
    for path in sorted(path for pattern in PAGES for path in args.root.glob(pattern)):
        before = path.read_text()
        after = fill(before, results)
        if after != before:
            path.write_text(after)
            print(f"written: {path}")
    for name, draw in FIGURES.items():
        draw(results, args.root / "results" / name)
    print(f"figures: {', '.join(FIGURES)}")
    return 0
