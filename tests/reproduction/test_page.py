"""Numbers that stand in sentences and in the README are those of the runs.

Most sentences of the page quote the runs (see test_quoted.py); these are the others.
"""

import json
import re
from functools import partial
from pathlib import Path

import pytest

from rabo.reproduction.equal_work import ahead
from rabo.reproduction.records import difference
from rabo.reproduction.results import Results
from rabo.reproduction.targets import AIMS, SUBMODELS

ROOT = Path(__file__).parents[2]
RESULTS = Results(ROOT / "results")


def said(name="experiments/page.md"):
    return " ".join((ROOT / name).read_text().split())


def listed(numbers, form=".1f"):
    *most, last = [f"{number:{form}}" for number in numbers]
    return f"{', '.join(most)} and {last}"


def cost_of(run, phase=None):
    summary = json.loads((ROOT / "results" / run / "summary.json").read_text())
    cost = summary["cost_by_phase"][phase] if phase else summary["cost"]
    return cost["multiply_adds"]


def test_the_page_says_where_the_multiply_adds_of_its_runs_went():
    rows = re.findall(r"^\| .*?\| (\d.*) \|$", MULTIPLY_ADDS, re.MULTILINE)
    told = [[float(number) for number in row.split(" | ")] for row in rows]
    shares = json.loads((ROOT / "results/multiply-adds/shares.json").read_text())
    columns = []
    for method in ("rabo", "rafbo", "fedmbo"):
        column = []
        for setting in ("5-way-1-shot", "20-way-5-shot"):
            run = f"results/table-1/{setting}/{method}/seed-0"
            phases = shares["per cent of a run"][run]
            last = phases.get("estimate_outer") or phases["estimate_privately"]
            first = [own for own in phases.values() if own is not last]
            features = [last["features"], sum(own["features"] for own in first)]
            queries = QUERIES[setting]
            column += [features[0] * queries, features[0] * (1 - queries), features[1]]
            column += [sum(own["head"] for own in first), last["head"]]
        columns.append(column)
    for row, expected in zip(told, zip(*columns, strict=True), strict=True):
        decimals = 2 if row[0] > 1 else 4
        assert row == pytest.approx(expected, abs=0.6 * 10**-decimals)


def test_the_page_says_what_would_be_left_without_an_implicit_term():
    left = []
    for setting in AIMS:
        run = f"table-1/{setting}/rabo/seed-0"
        sweep = cost_of(run, "estimate_outer") * (1 - QUERIES[setting])
        base = cost_of(f"table-1/{setting}/fedmbo/seed-0")
        left.append(100 * (cost_of(run) - sweep) / base)
    assert f"at {listed(left)} % of FedMBO's in the four settings" in said()


QUERIES = {  # share of a task's images that are queries, in training
    "5-way-1-shot": 19 / 20,
    "5-way-5-shot": 15 / 20,
    "20-way-1-shot": 5 / 6,
    "20-way-5-shot": 5 / 10,
}
MULTIPLY_ADDS = (
    (ROOT / "experiments/page.md")
    .read_text()
    .split("### Where the multiply-adds go")[1]
    .split("Features are computed once")[0]
)


def test_the_page_says_what_loss_tuning_costs():
    page = said()
    for method in ("rabo", "rafbo"):
        for phase in (None, "update_inner", "estimate_outer"):
            spent = cost_of(f"figure-tuning/cifar-10/{method}/seed-0", phase)
            assert f"{spent / 1e12:.0f} T" in page
    run = "figure-tuning/cifar-10/fedmbo/seed-0"
    assert f"{cost_of(run) / 1e12:,.0f} T multiply-adds" in page
    assert f"{cost_of(run, 'inner_slope') / 1e12:,.0f} T of them for steps on y" in page
    cost = json.loads((ROOT / "results" / run / "summary.json").read_text())["cost"]
    assert f"{(cost['bytes_up'] + cost['bytes_down']) / 1e9:,.0f} GB" in page
    left = [
        RESULTS.finished("figure-tuning")["cifar-10", method][0].metrics["residual"]
        for method in ("rabo", "rafbo")
    ]
    assert f"ends at {left[0]:.2f} (RABO) and {left[1]:.2f} (RAFBO)" in page


def test_the_page_says_when_rabo_is_best_over_four_times_the_rounds():
    runs, ranges = RESULTS.finished("study-longer"), []
    for setting in ("20-way-1-shot", "20-way-5-shot"):
        curves = [run.curve for run in runs[setting, "rabo-800"]]
        best = [max((e["metrics"]["accuracy"], e["round"]) for e in curve) for curve in curves]
        assert {when for _, when in best} <= {160, 240}
        ranges.append(f"{100 * min(best)[0]:.1f} to {100 * max(best)[0]:.1f}")
    assert f"after 160 or 240 rounds ({ranges[0]} and {ranges[1]})" in said()


def test_the_page_compares_shared_heads_with_the_best_that_baselines_ever_were():
    runs, least, best_of = RESULTS.finished("table-1"), [], {}
    for setting in AIMS:
        own = {r.run.experiment.seed: r.value for r in runs[setting, "rabo-shared"]}
        others = [run for m in SUBMODELS for run in runs[setting, f"{m}-shared"]]
        best = [max(100 * e["metrics"]["accuracy"] for e in run.curve) for run in others]
        seeds = [run.run.experiment.seed for run in others]
        least.append(min(own[s] - b for s, b in zip(seeds, best, strict=True)))
        best_of[setting] = f"{min(best):.1f} to {max(best):.1f}"
    page = said()
    assert f"at least {listed(least)} points above" in page
    falls = [
        max(100 * e["metrics"]["accuracy"] for e in run.curve) - run.value
        for setting in AIMS
        for m in SUBMODELS
        for run in runs[setting, f"{m}-shared"]
        if setting.startswith("5-way")
    ]
    assert 6 < max(falls) < 7
    assert "at 5-way they end at most 7 points below their best" in page
    assert f"reach {best_of['20-way-1-shot']} (1-shot) and {best_of['20-way-5-shot']}" in page


def test_the_page_says_what_is_left_of_the_linear_systems():
    runs, left = RESULTS.finished("table-1"), {}
    for setting in AIMS:
        for method in ("rabo", "fedmbo"):
            own = [run.metrics["residual"] for run in runs[setting, method]]
            left.setdefault((method, setting.split("-way")[0]), []).extend(own)
    page = said()
    five, twenty = left["fedmbo", "5"], left["fedmbo", "20"]
    assert f"leave {min(five):.2f} to {max(five):.2f} of its linear system at 5-way" in page
    assert f"and {min(twenty):.2f} to {max(twenty):.2f} at 20-way" in page
    assert f"leave at most {max(left['rabo', '5'] + left['rabo', '20']):.3f}" in page


def test_single_level_methods_send_as_much_as_the_page_says():
    cells = RESULTS.cells("table-1")
    for method in SUBMODELS:
        shares = {f"{cells[s, method].bytes / cells[s, 'rabo'].bytes:.2f}" for s in AIMS}
        assert shares == {"0.95"}
        times = [cells[s, method].multiply_adds / cells[s, "rabo"].multiply_adds for s in AIMS]
        assert listed(times) == "4.9, 4.6, 9.4 and 8.4"  # as in the README
    assert "for 0.95 times its bytes" in said()
    assert "with 4.9, 4.6, 9.4 and 8.4 times the multiply-adds of RABO" in said("README.md")
    spent = RESULTS.cells("study-longer")
    sent = {f"{spent[s, 'rabo-800'].bytes / cells[s, 'fedrolex'].bytes:.1f}" for s in AIMS}
    assert sent == {"4.2"}
    assert "and 4.2 times their bytes" in said()


def signs(own, other, how=difference):
    """Say for each cell whether it is above (+), below (-) or cannot be told from another (0)."""
    found = []
    for own_key, other_key in zip(keys(own), keys(other), strict=True):
        gap = how(runs_at(own_key), runs_at(other_key))
        is_told = abs(gap.value) > gap.interval
        found.append(("+" if gap.value > 0 else "-") if is_told else "0")
    return " ".join(found)


def keys(pattern):
    name, setting, method = pattern.split("/")
    grid = RESULTS.grid(name)
    settings = [s for s in grid.settings if setting in ("*", s)]
    return [(name, s, m) for s in settings for m in grid.methods(s) if method in ("*", m)]


def runs_at(key):
    name, *cell = key
    return RESULTS.finished(name)[tuple(cell)]


def of_table_1(own, other):
    return f"table-1/*/{own}", f"table-1/*/{other}"


@pytest.mark.parametrize(
    ("cells", "pattern"),
    [
        (of_table_1("rabo", "fedmbo"), "- - - -"),
        (of_table_1("rabo-shared", "fedmbo-shared"), "0 + 0 +"),  # "above at 5-shot"
        (of_table_1("rafbo", "rabo"), "0 0 0 0"),  # "cannot be told apart"
        (of_table_1("fedmbo", "dist-maml"), "0 0 + 0"),  # "beyond the interval in one setting"
        (of_table_1("dist-protonet", "fedmbo"), "0 + + 0"),  # "in two"
        (of_table_1("dist-protonet", "rabo"), "+ + + +"),
        (of_table_1("rabo", "static"), "+ + 0 +"),  # "cannot tell it from the other two"
        (of_table_1("rabo", "fiarse"), "+ + 0 +"),
        (of_table_1("rabo", "oap"), "+ + - +"),
        (of_table_1("rabo", "fedrolex"), "+ + - -"),
        (("study-variants/*/rabo-rolling", "table-1/*/rabo"), "0 0 + +"),
        (("study-longer/*/rabo-800", "table-1/*/rabo"), "0 0 - -"),
        (("study-capacities/changing/*", "study-capacities/fixed/*"), "0 0 0 +"),  # only FedRolex
        (("study-dirichlet/dirichlet/*", "study-dirichlet/shards/*"), "0 0 0 0"),
        (("study-errata/erratum-7/corrected", "study-errata/erratum-7/literal"), "0"),
        (("study-errata/erratum-13/corrected", "study-errata/erratum-13/literal"), "0"),
        (("study-errata/erratum-2/corrected", "study-errata/erratum-2/literal"), "+"),
    ],
)
def test_words_of_the_page_say_what_the_numbers_that_they_quote_say(cells, pattern):
    assert signs(*cells) == pattern


@pytest.mark.parametrize(
    ("other", "what", "pattern"),
    [
        ("fedmbo", "multiply-adds", "0 + - 0"),
        ("dist-protonet", "multiply-adds", "0 0 0 0"),  # "cannot tell them apart"
        ("dist-protonet", "bytes", "- - - -"),  # "the better choice"
        *((name, "multiply-adds", "+ + + +") for name in SUBMODELS),  # "above all four"
    ],
)
def test_words_of_the_page_on_equal_cost_say_what_the_numbers_say(other, what, pattern):
    assert signs(*of_table_1("rabo", other), how=partial(ahead, what=what)) == pattern


def accuracy_of(setting, method):
    return RESULTS.cells("table-1")[setting, method]


def at_equal_work():
    rows = json.loads((ROOT / "results" / "study-efficiency" / "equal_work.json").read_text())
    return {
        (row["setting"], row["method"]): row["value"]
        for row in rows
        if row["within"] == "multiply-adds"
    }


def test_the_readme_shows_what_the_runs_have_reached():
    readme = (ROOT / "README.md").read_text()

    def row(beginning):
        line = next(each for each in readme.splitlines() if each.startswith(f"| {beginning}"))
        return [cell.strip() for cell in line.split("|")[2:-1]]

    named = {
        "RABO, a head per task": "rabo",
        "RAFBO, a head per task": "rafbo",
        "FedMBO, the full model on every client": "fedmbo",
        "Dist-ProtoNet, the full model on every client": "dist-protonet",
        "RABO, one shared head, as in the paper": "rabo-shared",
    }
    for beginning, method in named.items():
        cells = [accuracy_of(setting, method) for setting in AIMS]
        assert row(beginning) == [
            f"{c.value:.1f} ± {c.interval:.1f}" if c.num_seeds == 3 else f"{c.value:.1f}"
            for c in cells
        ]
    best = [max(accuracy_of(setting, m).value for m in SUBMODELS) for setting in AIMS]
    assert row("the best of four single-level submodel methods, with") == [f"{b:.1f}" for b in best]
    reached = at_equal_work()
    best = [max(reached[setting, m] for m in SUBMODELS) for setting in AIMS]
    assert row("the best of them within the multiply-adds") == [f"{b:.1f}" for b in best]
