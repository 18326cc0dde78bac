"""Markdown tables of records."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from experiments.grid import Grid, Method, Setting
from experiments.grids.estimators import ESTIMATED, REFERENCE
from experiments.records import Record, grouped
from experiments.statistics import (
    COSTS,
    Mean,
    difference,
    full_model,
    mean_cost,
    mean_of,
    mean_within,
)

Groups = Mapping[tuple[str, str], Sequence[Record]]  # by setting and method
Budget = tuple[str, str]  # a method and one of its costs
CLOSE = 0.005  # a share of a budget so close to 1 is not printed


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as a table; the first one is its header."""
    header, *body = rows
    lines = [header, ["---"] * len(header), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table_of(grid: Grid, records: Sequence[Record]) -> str:
    """Return the table of a grid's runs."""
    if any("rows" in record.content for record in records):
        return estimators_table(records)
    check_coverage(grid, records)
    methods = {name: m for setting in grid.settings for name, m in grid.methods_of(setting).items()}
    return accuracy_table(
        grid.settings, methods, grouped(records), settings_are_rows=grid.settings_are_rows
    )


def accuracy_table(
    settings: Mapping[str, Setting],
    methods: Mapping[str, Method],
    groups: Groups,
    *,
    settings_are_rows: bool = False,
) -> str:
    """Return a row for each method that was run and a column for each setting, or transposed."""
    rows = [["", *(setting.label for setting in settings.values())]]
    for name, method in methods.items():
        own = [groups.get((setting, name), ()) for setting in settings]
        if any(own):
            papers = [setting.paper.get(method.paper) for setting in settings.values()]
            rows.append([method.label, *map(cell, own, papers)])
    return markdown(list(zip(*rows, strict=True)) if settings_are_rows else rows)


def cell(records: Sequence[Record], paper: float | None = None) -> str:
    """Format "paper / mean±interval (full model)"; * marks an interval over test tasks."""
    before = f"{paper:.2f} / " if paper is not None else ""
    if not records:
        return f"{before}–"
    mean = mean_of(records)
    text = before + _format(mean, ".2f" if "accuracy" in records[0].headline else ".2e")
    full = full_model(records)
    return text if full is None else f"{text} ({full:.2f})"


def _format(mean: Mean, form: str = ".2f") -> str:
    if mean.value is None:
        return "diverged"
    text = f"{mean.value:{form}}"
    if mean.interval is None:
        return text
    return f"{text}±{mean.interval:{form}}{'*' if mean.over_tasks else ''}"


def cost_table(
    settings: Mapping[str, Setting],
    methods: Mapping[str, Method],
    groups: Groups,
    baselines: Mapping[str, str],
) -> str:
    """Return multiply-adds and bytes of each method in per cent of its baseline's."""
    rows = [["", *(setting.label for setting in settings.values())]]
    for cost in COSTS:
        for method, baseline in baselines.items():
            row = [f"{cost.replace('_', '-')}, {methods[method].label}"]
            for setting in settings:
                own, base = groups.get((setting, method)), groups.get((setting, baseline))
                share = 100 * mean_cost(own, cost) / mean_cost(base, cost) if own and base else None
                row.append("–" if share is None else f"{share:.3f}")
            rows.append(row)
    return markdown(rows)


def within_table(
    settings: Mapping[str, Setting], methods: Mapping[str, Method], groups: Groups, budget: Budget
) -> str:
    """Return the accuracy of each method within a cost of another method's whole run."""
    of, cost = budget
    rows = [["", *(setting.label for setting in settings.values())]]
    for name, method in methods.items():
        row = [method.label]
        for setting in settings:
            own, base = groups.get((setting, name)), groups.get((setting, of))
            found = mean_within(own, mean_cost(base, cost), cost) if own and base else None
            row.append("–" if found is None else _format_within(*found))
        rows.append(row)
    return markdown(rows)


def _format_within(mean: Mean, share: float) -> str:
    return _format(mean) + ("" if abs(share - 1) <= CLOSE else f" (at {share:.2f})")


def differences_table(
    columns: Mapping[str, str], pairs: Sequence[tuple[str, Groups, str, Groups, str]]
) -> str:
    """Return own − other by seed: rows of (label, groups, method, groups, other method)."""
    rows = [["", *columns.values()]]
    for label, own, method, others, other in pairs:
        row = [label]
        for setting in columns:
            found = difference(own.get((setting, method), ()), others.get((setting, other), ()))
            row.append("–" if found is None else format_difference(found.value, found.interval))
        rows.append(row)
    return markdown(rows)


def format_difference(value: float, interval: float) -> str:
    """Format a difference with its sign."""
    sure = f"±{interval:.2f}" if interval == interval else ""
    return f"{value:+.2f}{sure}".replace("-", "−")


def candidates_table(grid: Grid, records: Sequence[Record]) -> str:
    """Return the candidates of each method with their results; the best one is bold."""
    groups, chosen = grouped(records), choose(grid, records)
    rows = [["method", "candidates"]]
    for name, setting in grid.settings.items():
        texts = []
        for candidate, method in grid.methods_of(name).items():
            if own := groups.get((name, candidate)):
                value = mean_of(own).value
                text = f"{method.label}: {'diverged' if value is None else f'{value:.2f}'}"
                is_best = chosen.get(name) == method.run["algorithm_options"]
                texts.append(f"**{text}**" if is_best else text)
        if texts:
            rows.append([setting.label, "<br>".join(texts)])
    return markdown(rows)


def choose(grid: Grid, records: Sequence[Record]) -> dict[str, Mapping[str, Any]]:
    """Return each method's best candidate once all its runs are complete."""
    groups, chosen = grouped(records), {}
    for name in grid.settings:
        candidates = grid.methods_of(name)
        if all((name, candidate) in groups for candidate in candidates):
            means = {each: mean_of(groups[name, each]).value for each in candidates}
            known = {each: value for each, value in means.items() if value is not None}
            if known:
                best = max(known, key=lambda each: known[each])
                chosen[name] = candidates[best].run["algorithm_options"]
    return chosen


def estimators_table(records: Sequence[Record]) -> str:
    """Return error by round, cosine, evaluations and relative work of each estimator."""
    rows = [row for record in records for row in record.content["rows"]]
    rounds = sorted({row["round"] for row in rows})
    header = ["estimator", *(f"round {number}" for number in rounds)]
    lines = [[*header, "cosine", "gradients", "work"]]
    reference = estimator_mean(rows, REFERENCE, "multiply_adds")
    for name in ESTIMATED:
        errors = [f"{estimator_mean(rows, name, 'error', number):.1e}" for number in rounds]
        cosine = estimator_mean(rows, name, "cosine")
        gradients = estimator_mean(rows, name, "evaluations")
        work = estimator_mean(rows, name, "multiply_adds") / reference
        lines.append([name, *errors, f"{cosine:.4f}", f"{gradients:,.0f}", f"{work:.2f}"])
    return markdown(lines)


def estimator_mean(
    rows: Sequence[Mapping[str, Any]], name: str, what: str, round: int | None = None
) -> float:
    """Return the mean of a column over clients and seeds."""
    return fmean(
        row[what]
        for row in rows
        if row["estimator"] == name and (round is None or row["round"] == round)
    )


def check_coverage(grid: Grid, records: Sequence[Record]) -> None:
    """Raise ValueError if the coverage of a run is not that of its setting."""
    for record in records:
        for name, expected in grid.settings[record.setting].coverage.items():
            got = record.content["coverage"][name]
            if got != expected:
                raise ValueError(f"{record.name} must have {name} = {expected}, got {got}")
