"""The page about runs: it shows the numbers of the files, whatever the files contain."""

import json
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plotly.graph_objects import Figure
from typer.testing import CliRunner

from rabo.cli import app
from rabo.runs.plots import METHOD_STYLES
from rabo.runs.report.attendance import MOST_CLIENTS, client_charts, sat_out
from rabo.runs.report.channels import MOST_ROWS, coverage_charts
from rabo.runs.report.classes import loss_charts
from rabo.runs.report.costs import cost_charts
from rabo.runs.report.page import page_of
from rabo.runs.report.progress import headline_charts, hypergradient_charts
from rabo.runs.report.runs import FILES, Run, find_runs, find_targets, read_run

EARLIER = Path(__file__).parent / "earlier"  # run folders of earlier versions
HOSTILE = "</script><script>hurt()</script><img src=x onerror=hurt()>&\"'"


def call(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of four clients, of which one never fits and one is never listened to."""
    out = tmp_path_factory.mktemp("runs") / "run"
    options = ("--clients", 4, "--rounds", 4, "--width", 16, "--capacities", "1,1/2,1,memory:1kB")
    done = call("run", "digits", *options, "--inner-steps", 2, "--out", out)
    assert done.exit_code == 0, done.output
    return out


def rounds_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Page(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.scripts, self._in = [], "", "", {}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._in = {**dict(attrs), "tag": tag}

    def handle_endtag(self, tag):
        self._in = {}

    def handle_data(self, data):
        if self._in.get("tag") == "script":
            self.scripts += data
        elif self._in.get("tag") != "style":
            self.text += data


def test_headline_charts_hold_the_numbers_of_the_rounds(folder):
    rounds = rounds_of(folder)
    by_round, by_traffic, by_work = headline_charts(find_runs([folder]))
    for chart, x in (
        (by_round, [1, 2, 3, 4]),
        (by_traffic, [r["total"]["bytes_up"] + r["total"]["bytes_down"] for r in rounds]),
        (by_work, [r["total"]["multiply_adds"] for r in rounds]),
    ):
        [line] = chart.data
        assert line["x"] == x
        assert line["y"] == [r["metrics"]["accuracy"] for r in rounds]
    norm, residual = hypergradient_charts(find_runs([folder]))
    assert norm.data[0]["y"] == [r["metrics"]["hypergradient_norm"] for r in rounds]
    assert residual.data[0]["y"] == [r["metrics"]["residual"] for r in rounds]


def test_plotly_accepts_every_chart(folder):
    [run] = find_runs([folder])
    rounds = [{"round": 0, "vectors": {"w": [1.0, 2.0]}}]
    loss = Run("r", "r", Path(), rounds=rounds, loss={"class_counts": [9.0, 1.0]})
    drawings = [client_charts, cost_charts, coverage_charts]
    charts = [chart for draw in drawings for chart in draw(run)]
    charts += [*headline_charts([run], {"accuracy": [0.5]}), *hypergradient_charts([run])]
    for chart in (*charts, *loss_charts(loss)):
        Figure(data=list(chart.data), layout=dict(chart.layout))  # raises at unknown properties


def test_a_single_evaluation_has_a_sensible_place_and_words():
    total = {"multiply_adds": 70, "bytes_up": 4, "bytes_down": 1}
    metrics = {"accuracy": 0.755, "residual": 0.5}
    line = {"round": 2, "metrics": metrics, "total": total}
    run = Run("r", "r", Path(), rounds=[line])
    charts = headline_charts([run])
    assert [chart.about for chart in charts] == ["r: 0.755 (one evaluation)."] * 3
    for chart in charts:
        assert chart.layout["xaxis"]["rangemode"] == chart.layout["yaxis"]["rangemode"] == "tozero"
    [residual] = hypergradient_charts([run])
    assert residual.about == "r: 0.5 (one round)."
    assert [c.layout["xaxis"].get("dtick") for c in (*charts, residual)] == [1, None, None, 1]
    late = Run("r", "r", Path(), rounds=[line | {"round": 99}])
    assert "dtick" not in headline_charts([late])[0].layout["xaxis"]


def test_costs_by_client_and_phase_add_up_to_those_of_the_rounds(folder):
    rounds = rounds_of(folder)
    work, traffic = cost_charts(*find_runs([folder]))
    assert sum(sum(bar["y"]) for bar in work.data) == sum(
        r["cost"]["multiply_adds"] for r in rounds
    )
    assert sum(sum(bar["y"]) for bar in traffic.data) == sum(
        r["cost"]["bytes_up"] + r["cost"]["bytes_down"] for r in rounds
    )
    assert [bar["x"] for bar in work.data] == [["0", "1", "2"]] * len(work.data)


def test_the_heat_map_of_channels_has_a_row_for_each_and_a_column_for_each_evaluation(folder):
    x, y = coverage_charts(*find_runs([folder]))
    assert len(x.data[0]["z"]) == 32
    assert len(y.data[0]["z"]) == 16
    assert x.data[0]["x"] == [1, 2, 3, 4]
    last = json.loads((folder / "coverage.jsonl").read_text().splitlines()[-1])
    assert [row[-1] for row in x.data[0]["z"]] == last["x"]["x.0"] + last["x"]["x.3"]
    assert x.layout["yaxis"]["ticktext"] == ["x.0", "x.3"]
    assert y.layout["yaxis"]["ticktext"] == ["from x.3"]  # the features that join x to y


@pytest.mark.parametrize(
    ("counts", "said"), [([1, 1], "by 1 client in"), ([5], "by 5 clients"), ([1, 5], "by 1 to 5 c")]
)
def test_how_many_trained_a_channel_is_said_once(counts, said):
    [chart] = coverage_charts(Run("r", "r", Path(), coverage=[{"round": 0, "x": {"x": counts}}]))
    assert f"trained {said}" in chart.about


def test_runs_of_different_tasks_name_their_results_and_lengths_are_drawn_by_their_powers():
    def run(name, *values):
        rounds = [{"round": i, "metrics": {name: value}} for i, value in enumerate(values)]
        return Run(name, name, Path(), rounds=rounds)

    runs = [run("accuracy", 0.5), run("gradient_norm", 1e-3, 1e-6, 0.0)]
    page = Page(page_of(runs, "/* */"))
    assert "accuracy 0.5" in page.text
    assert "gradient norm 1e-06" in Page(page_of([runs[0], run("gradient_norm", 1e-6)], "")).text
    assert "gradient norm 1e-06" not in Page(page_of([run("gradient_norm", 1e-6)], "")).text
    accuracy, norm = headline_charts(runs)[0], headline_charts(runs)[3]
    assert accuracy.layout["yaxis"]["type"] == "linear"
    assert norm.layout["yaxis"]["type"] == "log"
    assert norm.layout["yaxis"]["exponentformat"] == "power"
    assert norm.data[0]["y"] == [1e-3, 1e-6]


@given(st.lists(st.integers(1, 1500), min_size=1, max_size=5))
def test_many_channels_share_rows_and_keep_their_mean(sizes):
    layers = {f"x.{i}": [k % 7 for k in range(size)] for i, size in enumerate(sizes)}
    [chart] = coverage_charts(Run("r", "r", Path(), coverage=[{"round": 0, "x": layers}]))
    [drawn] = chart.data
    assert len(drawn["z"]) == len(drawn["y"]) == len(set(drawn["y"]))
    assert len(drawn["z"]) <= MOST_ROWS + len(sizes)
    if sum(sizes) <= MOST_ROWS:
        assert [row[0] for row in drawn["z"]] == [n for counts in layers.values() for n in counts]


def test_who_sat_out_and_why_is_shown_for_few_and_for_many_clients(folder):
    [run] = find_runs([folder])
    [(who, why, times)] = sat_out(run)
    assert (who, times) == ("client 3", 4)
    assert "no submodel fits" in why
    [chart] = client_charts(run)
    assert chart.data[0]["z"] == [[1.0] * 4, [0.5] * 4, [1.0] * 4, [0.0] * 4]
    fault = {"client": 1, "round": 0, "phase": "update_inner", "why": "it is gone"}
    widths = {str(c): 1.0 for c in range(2)}
    line = {"round": 0, "present": widths, "absent": {}, "faults": [fault], "skipped": "too few"}
    few = Run("r", "r", Path(), rounds=[line])
    assert [data["type"] for data in client_charts(few)[0].data] == ["heatmap", "scatter"]
    assert sat_out(few) == [
        ("client 1", "answer not used: it is gone", 1),
        ("all", "round given up: too few", 1),
    ]
    line = {**line, "present": {str(c): 1.0 for c in range(MOST_CLIENTS + 1)}}
    [chart] = client_charts(Run("r", "r", Path(), rounds=[line]))
    assert [data["y"] for data in chart.data] == [[MOST_CLIENTS + 1], [0], [1]]


def test_a_tuned_loss_is_shown_class_by_class():
    rounds = [
        {"round": r, "vectors": {"w": [1.0, r], "accuracy_per_class": [0.5, None]}} for r in (1, 3)
    ]
    run = Run("r", "r", Path(), rounds=rounds, loss={"class_counts": [90.0, 10.0]})
    w, accuracy = loss_charts(run)
    assert [(line["name"], line["x"], line["y"]) for line in w.data] == [
        ("class 0 (90)", [2, 4], [1.0, 1.0]),
        ("class 1 (10)", [2, 4], [1, 3]),
    ]
    assert accuracy.data[1]["y"] == [None, None]


def test_the_page_is_whole_and_every_picture_has_words(folder):
    page = Page(page_of(find_runs([folder, *(EARLIER / "few-shot").glob("rabo-5w*")]), "/* */"))
    labels = [a["aria-label"] for _, a in page.tags if a.get("class") == "chart"]
    assert len(labels) == page.scripts.count("Plotly.newPlot") == 3 + 2 + 5
    assert all(len(label) > 20 for label in labels)
    images = [a for tag, a in page.tags if tag == "img"]
    assert len(images) == 4
    assert all(a["alt"] and a["src"].startswith("data:image/png;base64,") for a in images)
    addresses = [a[name] for _, a in page.tags for name in ("src", "href") if name in a]
    assert all(address.startswith("data:") for address in addresses)
    assert "finished, 4 rounds" in page.text
    assert "tasks.png" not in page.text  # every run of a task with pictures has its own


@pytest.mark.parametrize("file", FILES)
def test_a_run_that_lacks_a_file_gives_a_page_that_says_so(folder, tmp_path, file):
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    (copy / file).unlink()
    [run] = find_runs([copy])
    assert file in run.missing[0]
    page = Page(page_of([run], "/* */"))
    assert f"{file} ({FILES[file]})" in page.text
    assert run.headline == "accuracy"
    assert ("not ended" in page.text) == (file == "summary.json")


def test_what_is_kept_of_a_run_of_a_grid_has_lines_too(tmp_path):
    (tmp_path / "config.json").write_text('{"task": "digits", "rounds": 20}')
    points = [
        {"round": 10 * k, "metrics": {"accuracy": k / 4}, "spent": {"multiply_adds": 7 * k}}
        for k in (1, 2)
    ]
    (tmp_path / "curve.jsonl").write_text("\n".join(map(json.dumps, points)))
    [run] = find_runs([tmp_path])
    by_round, _, by_work = headline_charts([run])
    assert (by_round.data[0]["x"], by_round.data[0]["y"]) == ([10, 20], [0.25, 0.5])
    assert by_work.data[0]["x"] == [7, 14]
    assert run.status == "not ended, 20 rounds"


def test_a_run_that_has_just_begun_gives_a_page(tmp_path):
    (tmp_path / "config.json").write_text('{"task": "digits", "rounds": 9}')
    page = Page(page_of(find_runs([tmp_path]), "/* */"))
    assert "not ended, 0 of 9 rounds" in page.text


NAMES = (
    "round metrics accuracy cost total coverage x present absent faults client vectors w 0 skipped "
    "headline class_counts status rounds task"
)
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NAMES.split()), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.lists(JSON, max_size=4), JSON, st.text(max_size=40))
def test_files_that_hold_anything_give_a_page(tmp_path_factory, lines, content, noise):
    folder = tmp_path_factory.mktemp("run")
    for i, line in enumerate(lines):
        if isinstance(line, dict):
            line.setdefault("round", i)
    text = "\n".join(json.dumps(line) for line in lines)
    (folder / "metrics.jsonl").write_text(f"{text}\n{noise}", errors="replace")
    (folder / "coverage.jsonl").write_text(text)
    (folder / "costs.csv").write_text(f"round,client,phase\n{noise}", errors="replace")
    for name in ("config.json", "summary.json", "loss.json"):
        (folder / name).write_text(json.dumps(content))
    page = Page(page_of([read_run(folder, "run", "run")], "/* */"))
    assert "run" in page.text


def test_what_files_say_is_shown_and_never_run(folder, tmp_path):
    copy = tmp_path / HOSTILE.replace("/", "∕")
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    config |= {"task": HOSTILE, "algorithm": HOSTILE, "headline": HOSTILE}
    (copy / "config.json").write_text(json.dumps(config))
    summary = json.loads((copy / "summary.json").read_text()) | {"headline": HOSTILE}
    (copy / "summary.json").write_text(json.dumps(summary | {"status": HOSTILE}))
    lines = rounds_of(copy)
    for line in lines:
        line["metrics"][HOSTILE] = 1.0
        line["absent"] = {"3": HOSTILE}
    (copy / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    costs = (copy / "costs.csv").read_text().replace("update_inner", "<img src=x onerror=hurt()>")
    (copy / "costs.csv").write_text(costs)
    page = Page(page_of(find_runs([copy, folder]), "/* */"))
    assert not [tag for tag, _ in page.tags if tag == "img"]
    nonces = {a.get("nonce") for tag, a in page.tags if tag == "script"}
    assert len(nonces) == 1
    assert nonces != {None}
    assert HOSTILE in page.text
    assert "<img" not in page.scripts
    assert "\\u003cimg" not in page.scripts  # plotly reads HTML in texts
    assert "&lt;img" in page.scripts


def test_a_comparison_shows_the_mean_and_band_of_its_seeds_and_its_target(tmp_path):
    out = tmp_path / "both"
    options = ("--rounds", 2, "--clients", 2, "--seeds", 2, "--algorithms", "rabo,fedavg")
    assert call("compare", "quadratic", *options, "--out", out).exit_code == 0
    runs = find_runs([out])
    assert [run.name for run in runs] == [
        *("fedavg/seed-0", "fedavg/seed-1", "rabo/seed-0", "rabo/seed-1")
    ]
    targets = find_targets([out])
    target = json.loads((out / "results.json").read_text())["target"]
    assert targets == find_targets([tmp_path]) == {"gradient_norm": [target]}
    fedavg_band, fedavg, rabo_band, rabo, level = headline_charts(runs, targets)[0].data
    first, second = (
        [done["metrics"]["gradient_norm"] for done in rounds_of(out / "rabo" / f"seed-{k}")]
        for k in (0, 1)
    )
    pairs = list(zip(first, second, strict=True))
    assert rabo["y"] == pytest.approx([sum(pair) / 2 for pair in pairs])
    assert rabo_band["y"] == [*map(max, pairs), *reversed([*map(min, pairs)])]
    assert rabo["customdata"] == [sorted(pair) for pair in pairs]
    assert [fedavg["line"]["color"], rabo["line"]["color"]] == [
        METHOD_STYLES["fedavg"].colour,
        METHOD_STYLES["rabo"].colour,
    ]
    assert fedavg_band["fillcolor"] == fedavg["line"]["color"]
    assert (level["name"], level["y"]) == (f"target {target:.4g}", [target, target])
    named = [trace["name"] for trace in (fedavg, rabo, level)]
    assert [t["name"] for t in headline_charts(runs, targets)[0].data if t["showlegend"]] == named


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["digits-rabo-20260101-101010"], ["digits-rabo"]),
        (
            ["digits-rabo-20260101-101010", "digits-rafbo-20260101-101011"],
            ["digits-rabo", "digits-rafbo"],
        ),
        (
            ["digits-rabo-20260101-101010", "digits-rabo-20260101-101011"],
            ["digits-rabo-…0101-101010", "digits-rabo-…0101-101011"],
        ),
        (["flower-12345678901234567890", "q"], ["flower-12345…01234567890", "q"]),
        ([f"the-same-at-both-{k}-of-its-long-ends" for k in (1, 2)], None),
    ],
)
def test_runs_have_short_names_that_differ(tmp_path, folders, names):
    for folder in folders:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
    assert [run.name for run in find_runs([tmp_path])] == (names or folders)


def test_runs_of_before_have_lines_too():
    runs = find_runs([EARLIER / "few-shot", EARLIER / "loss-tuning" / "rabo"])
    charts = {chart.title: chart for chart in headline_charts(runs)}
    assert len(charts) == 6
    lines = rounds_of(EARLIER / "loss-tuning" / "rabo")
    [line] = charts["balanced accuracy against multiply-adds"].data
    assert line["x"][-1] == sum(done["cost"]["multiply_adds"] for done in lines)
    assert len(loss_charts(runs[-1])) == 4
    assert "coverage.jsonl (which channels were trained)" in Page(page_of(runs, "")).text


def test_the_command_writes_the_page_and_says_what_is_wrong(folder, tmp_path, monkeypatch):
    out = tmp_path / "new" / "report.html"
    done = call("report", folder, "--out", out)
    assert done.exit_code == 0, done.output
    assert f"written: {out} (1 run)" in done.output.replace("\n", "")
    assert out.stat().st_size > 1_000_000  # what draws is in it
    shutil.copytree(folder, tmp_path / "runs" / "a")
    shutil.copytree(folder, tmp_path / "runs" / "b")
    (tmp_path / "runs" / "a" / "costs.csv").unlink()
    monkeypatch.chdir(tmp_path)
    done = call("report", "runs/a", "runs/b")
    assert "files are missing in 1 of 2 runs" in " ".join(done.output.split())
    assert call("report", "runs/b").exit_code == 0
    pages = sorted(page.relative_to(tmp_path) for page in tmp_path.rglob("*.html"))
    assert [*map(str, pages)] == ["new/report.html", "runs/b/report.html", "runs/report.html"]
    empty = call("report", tmp_path / "new", "--out", out)
    assert empty.exit_code == 1
    assert str(tmp_path / "new") in empty.output.replace("\n", "")
    into = call("report", folder, "--out", tmp_path)
    assert into.exit_code == 2
    assert not list(tmp_path.glob("*.html"))
    missing = call("report", tmp_path / "nowhere")
    assert missing.exit_code == 1
    assert str(tmp_path / "nowhere") in missing.output.replace("\n", "")


@pytest.mark.parametrize("package", ["plotly", "jinja2"])
def test_a_missing_package_is_one_line_that_names_the_extra(folder, tmp_path, monkeypatch, package):
    for name in [n for n in sys.modules if n.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    without = call("report", folder, "--out", tmp_path / "report.html")
    assert without.exit_code == 1
    [line] = without.stderr.splitlines()
    assert package in line
    assert "pip install 'rabo[report]'" in line
