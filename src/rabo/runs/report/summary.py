"""The table of a report: one row of results and costs per run."""

from collections.abc import Mapping, Sequence
from typing import Any

from rabo.runs.report.figures import words
from rabo.runs.report.runs import Run, mapping, number, text
from rabo.runs.terminal import short


def headline_table(runs: Sequence[Run]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Return the heads and the rows."""
    names = {run.headline for run in runs if run.headline}
    result = words(*names) if len(names) == 1 else "result"
    costs, coverage = ("multiply-adds", "bytes"), ("coverage of x", "coverage of y")
    heads = ("run", "algorithm", result, *costs, *coverage, "status")
    return heads, [_headline_row(run, is_named=len(names) > 1) for run in runs]


def _headline_row(run: Run, is_named: bool) -> list[str]:
    metrics = {n: v for done in run.rounds for n, v in mapping(done, "metrics").items()}
    metrics |= mapping(run.summary, "metrics")
    value, interval = number(metrics, run.headline), number(metrics, "interval")
    reached = "–" if value is None else f"{value:.4g}"
    reached += f" ± {interval:.2g}" if value is not None and interval is not None else ""
    if is_named and value is not None:
        reached = f"{words(run.headline)} {reached}"
    last = run.rounds[-1] if run.rounds else {}
    cost = mapping(run.summary, "cost") or mapping(last, "total")
    share = mapping(run.summary, "relative_cost") or mapping(last, "relative_cost")
    coverage = mapping(run.summary, "coverage") or _coverage(run)
    work = number(cost, "multiply_adds")
    traffic = (number(cost, "bytes_up") or 0) + (number(cost, "bytes_down") or 0)
    return [
        run.name,
        text(run.config, "algorithm") or text(run.summary, "algorithm") or "–",
        reached,
        "–" if work is None else f"{short(work)}{_share(share, 'multiply_adds')}",
        "–" if not cost else f"{short(traffic)}B",
        *(_covered(coverage, level) for level in ("x", "y")),
        run.status,
    ]


def _coverage(run: Run) -> dict[str, Any]:
    """Return C* and the share ever trained from the rounds of a run without a summary."""
    found: dict[str, Any] = {}
    for level in ("x", "y"):
        each = [mapping(mapping(done, "coverage"), level) for done in run.rounds]
        least = [number(c, "minimum") for c in each if number(c, "num_trained")]
        found[f"{level}_min"] = min((n for n in least if n is not None), default=None)
        found[f"{level}_trained"] = each[-1].get("ever_trained") if each else None
    return found


def _covered(coverage: Mapping[str, Any], level: str) -> str:
    least, trained = number(coverage, f"{level}_min"), number(coverage, f"{level}_trained")
    return "–" if least is None or trained is None else f"C* {least:.0f}, {trained:.0%} trained"


def _share(of: Any, name: str) -> str:
    share = number(of, name)
    return "" if share is None else f" ({share:.0%} of full)"
