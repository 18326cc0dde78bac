"""The tables and figures of the documentation, from the records of one or more grids."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from experiments.figures import Panel, draw_costs, draw_estimators, draw_panels, styles_by_label
from experiments.grid import Grid, Method, Setting, describe, restrict
from experiments.grids import GRIDS
from experiments.grids.few_shot import (
    BOTH_HEADS,
    METHODS,
    SETTINGS,
    SHARED,
    SHARED_LABEL,
    more_clients,
)
from experiments.grids.studies import CHANGING, FIXED, OVER_ALPHABETS, SHARDS
from experiments.records import FILE, Record, grouped, read_records
from experiments.statistics import COSTS, ahead, mean_cost, mean_of
from experiments.tables import (
    Groups,
    accuracy_table,
    candidates_table,
    cost_table,
    differences_table,
    format_difference,
    markdown,
    table_of,
    within_table,
)

BASELINES = {"rabo": "fedmbo", "rafbo": "fedmbo"}
SHARED_BASELINES = {f"{name}{SHARED}": f"{base}{SHARED}" for name, base in BASELINES.items()}
PAPER_COSTS = {  # fig:cost_few and fig:cost_tune, in per cent of FedMBO's: few-shot, loss tuning
    ("rabo", "multiply_adds"): (26.7, 50.0),
    ("rafbo", "multiply_adds"): (17.8, 25.0),
    ("rabo", "bytes"): (26.7, 25.0),
    ("rafbo", "bytes"): (26.7, 25.0),
}
SINGLE_LEVEL = ("static", "oap", "fedrolex", "fiarse")
FULL_MODEL = ("fedmbo", "dist-protonet")
DIGITS_BASELINE = "fedmbo"
MAX_VALUES = 4  # of an option that `facts` prints


class Results:
    """The records below a folder; each file is read once."""

    def __init__(self, root: Path):
        self.root = root
        self.records = cache(self._records)

    def _records(self, name: str) -> list[Record]:
        return read_records(self.root / name / FILE)

    def groups(self, name: str) -> dict[tuple[str, str], list[Record]]:
        return grouped(self.records(name))


def table_1(results: Results, *, shared: bool) -> str:
    """Return Table 1 with a head per task, or with one shared head."""
    methods = {
        name: replace(method, label=method.label.removesuffix(SHARED_LABEL))
        for name, method in _with_heads(METHODS, shared).items()
    }
    return accuracy_table(SETTINGS, methods, results.groups("table-1"))


def _with_heads(methods: Mapping[str, Method], shared: bool) -> dict[str, Method]:
    return {name: own for name, own in methods.items() if name.endswith(SHARED) == shared}


def table_2(results: Results, *, shared: bool) -> str:
    """Return Table 2; the runs of 10 clients are those of Table 1."""
    grid = GRIDS["table-2"]
    groups: dict[tuple[str, str], Sequence[Record]] = {**results.groups("table-2")}
    settings: dict[str, Setting] = {}
    for shots in (1, 5):
        ten = f"5-way-{shots}-shot-10-clients"
        for (setting, method), own in results.groups("table-1").items():
            if setting == f"5-way-{shots}-shot":
                groups[ten, method] = own
        settings[ten] = more_clients(shots, 10)
        settings |= {name: own for name, own in grid.settings.items() if f"-{shots}-shot" in name}
    methods = _with_heads(restrict(METHODS, BOTH_HEADS), shared)
    return accuracy_table(settings, methods, groups, settings_are_rows=True)


def costs(results: Results) -> str:
    """Return the cost of RABO and RAFBO in per cent of FedMBO's."""
    baselines = {**BASELINES, **SHARED_BASELINES}
    return cost_table(SETTINGS, METHODS, results.groups("table-1"), baselines)


def costs_tuning(results: Results) -> str:
    """Return the cost of RABO and RAFBO in loss tuning in per cent of FedMBO's."""
    grid = GRIDS["figure-tuning"]
    return cost_table(grid.settings, grid.methods, results.groups(grid.name), BASELINES)


def within(results: Results, *, cost: str) -> str:
    """Return the accuracy of each method within a cost of RABO's run."""
    return within_table(SETTINGS, METHODS, results.groups("table-1"), ("rabo", cost))


def rabo_over_others(results: Results) -> str:
    """Return RABO − each other method by seed, and further differences of Table 1."""
    groups = results.groups("table-1")
    columns = {name: setting.label for name, setting in SETTINGS.items()}
    pairs = []
    for end in ("", SHARED):
        names = [f"{name}{end}" for name in (*FULL_MODEL, "dist-maml", *SINGLE_LEVEL, "rafbo")]
        for name in names:
            if name in METHODS:
                label = f"RABO{', shared head' * bool(end)} over {METHODS[name].label}"
                pairs.append((label, groups, f"rabo{end}", groups, name))
    for own, other in (
        ("fedmbo", "dist-maml"),
        ("fedmbo", "dist-protonet"),
        ("rabo", f"rabo{SHARED}"),
    ):
        label = f"{METHODS[own].label} over {METHODS[other].label}"
        pairs.append((label, groups, own, groups, other))
    return differences_table(columns, pairs)


def ahead_of_others(results: Results) -> str:
    """Return how far RABO ends above full-model methods within its own cost."""
    groups = results.groups("table-1")
    rows = [["", *(setting.label for setting in SETTINGS.values())]]
    for own, other in (
        ("rabo", "fedmbo"),
        ("rabo", "dist-protonet"),
        (f"rabo{SHARED}", f"fedmbo{SHARED}"),
    ):
        for cost in COSTS:
            row = [
                f"{METHODS[own].label} over {METHODS[other].label}, same {cost.replace('_', '-')}"
            ]
            for setting in SETTINGS:
                found = ahead(groups[setting, own], groups[setting, other], cost)
                row.append("–" if found is None else format_difference(*found[:2]))
            rows.append(row)
    return markdown(rows)


def capacities_omniglot(results: Results) -> str:
    """Return changing capacities beside the fixed ones of Table 1."""
    grid = GRIDS["study-capacities-omniglot"]
    return _beside_table_1(results, grid, "fixed", {"fixed": FIXED, "changing": CHANGING})


def dirichlet_omniglot(results: Results) -> str:
    """Return Dirichlet clients beside the shards of Table 1."""
    grid = GRIDS["study-dirichlet-omniglot"]
    return _beside_table_1(results, grid, "shards", {"shards": SHARDS, "dirichlet": OVER_ALPHABETS})


def _beside_table_1(
    results: Results, grid: Grid, name: str, settings: Mapping[str, Setting]
) -> str:
    table_1 = results.groups("table-1")
    own = {(name, method): table_1["5-way-1-shot", method] for method in grid.methods}
    return accuracy_table(settings, grid.methods, {**own, **results.groups(grid.name)})


def compare_digits(results: Results) -> str:
    """Return accuracy and costs of the algorithms compared on digits."""
    groups = {method: own for (_, method), own in results.groups("compare-digits").items()}
    rows = [["algorithm", "accuracy", "multiply-adds", "bytes"]]
    for name, own in groups.items():
        mean = mean_of(own)
        row = [name, f"{mean.value:.1f}±{mean.interval:.2g}"]
        for cost, unit, symbol in (("multiply_adds", 1e9, "G"), ("bytes", 1e6, "MB")):
            value, base = mean_cost(own, cost), mean_cost(groups[DIGITS_BASELINE], cost)
            row.append(f"{value / unit:.3g} {symbol} ({value / base:.0%})")
        rows.append(row)
    return markdown(rows)


def own_table(results: Results, *, name: str) -> str:
    """Return the table of one grid."""
    grid, records = GRIDS[name], results.records(name)
    return candidates_table(grid, records) if name.startswith("tuning") else table_of(grid, records)


def facts(results: Results, *, name: str) -> str:
    """Return the number of runs with their seeds, options, versions, devices and times."""
    records = results.records(name)
    contents = [record.content for record in records]
    configs = [content["config"] for content in contents]
    found = [f"Runs: {len(records)}", f"seeds {_listed({record.seed for record in records})}"]
    for option in ("rounds", "clients", "capacities"):
        values = dict.fromkeys(str(config[option]) for config in configs)
        found += [f"{option} {' or '.join(values)}"] if len(values) <= MAX_VALUES else []
    shared = {
        name: value
        for name, value in configs[0]["task_options"].items()
        if all(config["task_options"].get(name) == value for config in configs)
    }
    found += [describe(shared)] if shared else []
    versions = [{k: v for k, v in c["versions"].items() if k != "code"} for c in contents]
    found += dict.fromkeys(", ".join(f"{k} {v}" for k, v in own.items()) for own in versions)
    found += dict.fromkeys(c["device"] for c in contents if "device" in c)
    times = [seconds for c in contents if (seconds := c.get("wall_seconds"))]
    found += [f"{median(times):.0f} s a run (median)"] if times else []
    return "; ".join(found) + "."


def _listed(values: set[int]) -> str:
    return ", ".join(map(str, sorted(values)))


def draw_rounds(results: Results, path: Path) -> None:
    """Draw Table 1's accuracy against rounds."""
    draw_panels(_table_1_panels(results, ["round"]), path)


def draw_work(results: Results, path: Path) -> None:
    """Draw Table 1's accuracy against bytes and multiply-adds."""
    draw_panels(_table_1_panels(results, ["bytes", "multiply_adds"]), path)


def _table_1_panels(results: Results, axes: Sequence[str]) -> list[list[Panel]]:
    """Return a column for each setting; methods with a shared head have their own rows."""
    groups = results.groups("table-1")
    return [
        [
            _panel(setting.label + ", shared head" * shared, axis, _lines(groups, name, methods))
            for name, setting in SETTINGS.items()
        ]
        for shared in (False, True)
        for axis in axes
        for methods in [_with_heads(METHODS, shared)]
    ]


def _panel(
    title: str, axis: str, lines: Mapping[str, Sequence[Record]], levels: Sequence[str] = ()
) -> Panel:
    return Panel(title, axis, lines, styles_by_label(lines), levels)


def _lines(
    groups: Groups, setting: str, methods: Mapping[str, Method]
) -> dict[str, Sequence[Record]]:
    return {m.label: groups[setting, n] for n, m in methods.items() if (setting, n) in groups}


def draw_coverage(results: Results, path: Path) -> None:
    """Draw a panel for each method, with a line for each coverage."""
    grid, groups = GRIDS["figure-coverage"], results.groups("figure-coverage")
    row = []
    for name, method in grid.methods.items():
        lines = {own.label: groups[setting, name] for setting, own in grid.settings.items()}
        row.append(_panel(method.label, "round", lines))
    draw_panels([row], path)


def draw_tuning(results: Results, path: Path) -> None:
    """Draw loss tuning; full models are levels."""
    grid, groups = GRIDS["figure-tuning"], results.groups("figure-tuning")
    [name] = grid.settings
    levels = [grid.methods[method].label for method in ("fedavg", "fedmbo")]
    lines = _lines(groups, name, grid.methods)
    draw_panels([[_panel(grid.settings[name].label, "round", lines, levels)]], path)


def draw_longer(results: Results, path: Path) -> None:
    """Draw 800 rounds of RABO."""
    grid, groups = GRIDS["study-longer"], results.groups("study-longer")
    row = [
        _panel(setting.label, "round", _lines(groups, name, grid.methods))
        for name, setting in grid.settings.items()
    ]
    draw_panels([row], path)


def draw_digits(results: Results, path: Path) -> None:
    """Draw the comparison on digits against rounds, bytes and multiply-adds."""
    lines = {method: own for (_, method), own in results.groups("compare-digits").items()}
    draw_panels(
        [[_panel("digits", axis, lines) for axis in ("round", "bytes", "multiply_adds")]], path
    )


def draw_errors(results: Results, path: Path) -> None:
    """Draw the errors of all estimators."""
    draw_estimators(results.records("study-estimators"), path)


def draw_table_1_costs(results: Results, path: Path) -> None:
    """Draw the costs of Table 1 beside the paper's."""
    baselines = {**BASELINES, **SHARED_BASELINES}
    draw_costs(_shares(results, "table-1", SETTINGS, METHODS, baselines, 0), path)


def draw_tuning_costs(results: Results, path: Path) -> None:
    """Draw the costs of loss tuning beside the paper's."""
    grid = GRIDS["figure-tuning"]
    draw_costs(_shares(results, grid.name, grid.settings, grid.methods, BASELINES, 1), path)


def _shares(
    results: Results,
    name: str,
    settings: Mapping[str, Setting],
    methods: Mapping[str, Method],
    baselines: Mapping[str, str],
    column: int,
) -> dict[str, dict[str, Any]]:
    """Return, for each setting, the bars of each method: ours and the paper's."""
    groups, found = results.groups(name), {}
    for setting, own in settings.items():
        bars = {}
        for method, baseline in baselines.items():
            for cost in COSTS:
                mine, base = groups[setting, method], groups[setting, baseline]
                share = 100 * mean_cost(mine, cost) / mean_cost(base, cost)
                paper = PAPER_COSTS[method.removesuffix(SHARED), cost][column]
                bars[f"{methods[method].label}\n{cost.replace('_', '-')}"] = share, paper
        found[own.label] = bars
    return found
