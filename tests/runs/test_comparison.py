"""Comparisons: numbers are those of the runs, and what is finished is not run again."""

import csv
import json

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from rabo.algorithms import ALGORITHMS
from rabo.cli import app
from rabo.runs import comparison
from rabo.runs.comparison import Point, Price, common_target, confidence, price_of
from rabo.runs.plots import METHOD_STYLES
from watchers import OnRound

runner = CliRunner()
OPTIONS = ["--rounds", 4, "--clients", 2, "--seed", 3, "--seeds", 2, "--evaluate-every", 2]
NAMES = ["rabo", "fedavg"]


def call(*arguments):
    return runner.invoke(app, [str(a) for a in arguments])


def compare_digits(out, *options):
    names = ",".join(NAMES)
    return call("compare", "digits", "--algorithms", names, *OPTIONS, "--out", out, *options)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    out = tmp_path_factory.mktemp("comparison") / "out"
    found = compare_digits(out)
    assert found.exit_code == 0, found.output
    return out, found.output


def read(path):
    return json.loads(path.read_text())


def test_a_comparison_reports_what_its_runs_recorded(done):
    out, text = done
    results = read(out / "results.json")
    assert results["headline"] == "accuracy"
    assert results["baseline"] == "rabo"
    assert f"to reach accuracy {results['target']:.4g}, mean of seeds" in " ".join(text.split())
    summaries = {n: [read(out / n / f"seed-{k}" / "summary.json") for k in (3, 4)] for n in NAMES}
    means = {}
    for name, (a, b) in summaries.items():
        row = results["algorithms"][name]
        values = [s["metrics"]["accuracy"] for s in (a, b)]
        assert row["value"] == pytest.approx(sum(values) / 2)
        assert row["interval"] == pytest.approx(12.7062047 * abs(values[0] - values[1]) / 2)
        means[name] = [
            sum(s["cost"][k] for s in (a, b) for k in keys) / 2
            for keys in (("bytes_up", "bytes_down"), ("multiply_adds",))
        ]
        assert [row["bytes"], row["multiply_adds"]] == pytest.approx(means[name])
        assert name in text
    row = results["algorithms"]["fedavg"]
    relative = [a / b for a, b in zip(means["fedavg"], means["rabo"], strict=True)]
    assert [row["relative_bytes"], row["relative_multiply_adds"]] == pytest.approx(relative)
    with (out / "results.csv").open() as file:
        table = {line["algorithm"]: line for line in csv.DictReader(file)}
    assert list(table) == NAMES
    assert float(table["fedavg"]["value"]) == row["value"]
    assert (out / "results.png").read_bytes().startswith(b"\x89PNG")


def test_the_figure_draws_a_mean_and_a_band_per_algorithm_and_names_the_target(done, monkeypatch):
    figures = []
    monkeypatch.setattr(comparison, "save", lambda figure, path: figures.append(figure))
    results = read(done[0] / "results.json")
    assert compare_digits(done[0]).exit_code == 0
    [panel, *_] = figures[0].axes
    lines = {line.get_label(): line for line in panel.get_lines()}
    assert list(lines) == [*NAMES, f"target {results['target']:.4g}"]
    values = [[point["value"] for point in curve] for curve in results["curves"]["rabo"]]
    means = [sum(pair) / 2 for pair in zip(*values, strict=True)]
    assert lines["rabo"].get_ydata() == pytest.approx(means)
    assert lines["rabo"].get_color() == METHOD_STYLES["rabo"].colour
    assert len(panel.collections) == len(NAMES)  # the bands


def test_a_curve_ends_with_what_the_whole_run_cost(done):
    out, _ = done
    for name, curves in read(out / "results.json")["curves"].items():
        for k, curve in enumerate(curves):
            cost = read(out / name / f"seed-{3 + k}" / "summary.json")["cost"]
            assert [point["rounds"] for point in curve] == [2, 4]
            assert curve[-1]["bytes"] == cost["bytes_up"] + cost["bytes_down"]
            assert curve[-1]["multiply_adds"] == cost["multiply_adds"]


def test_every_run_reaches_the_target_by_default(done):
    results = read(done[0] / "results.json")
    best = [max(p["value"] for p in c) for own in results["curves"].values() for c in own]
    assert results["target"] == min(best)
    assert all(row["to_target"]["num_reached"] == 2 for row in results["algorithms"].values())


def test_algorithms_see_the_same_data_and_start_per_seed(done):
    out, _ = done
    configs = [read(out / n / f"seed-{k}" / "config.json") for n in NAMES for k in (3, 4)]
    assert [c["seed"] for c in configs] == [3, 4, 3, 4]
    assert [c["algorithm"] for c in configs] == ["rabo", "rabo", "fedavg", "fedavg"]
    for config in configs:
        del config["seed"], config["algorithm"], config["algorithm_settings"]
    assert all(config == configs[0] for config in configs)


def test_another_target_and_baseline_need_no_further_run(done, monkeypatch):
    out, _ = done

    def no_run(*_):
        raise AssertionError("everything is finished")

    monkeypatch.setattr(comparison, "run", no_run)
    found = compare_digits(out, "--target", 2, "--baseline", "fedavg")
    assert found.exit_code == 0, found.output
    assert "finished before" in found.output
    assert "not reached" in " ".join(found.output.split())
    results = read(out / "results.json")
    assert results["algorithms"]["fedavg"]["relative_bytes"] == 1
    assert results["algorithms"]["rabo"]["to_target"] is None
    assert compare_digits(out).exit_code == 0  # as it was, for the tests beside this one


def test_an_interrupted_comparison_goes_on_with_what_is_missing(tmp_path, monkeypatch):
    out, begun, run = tmp_path / "out", [], comparison.run

    def watched(experiment, where, writers):
        begun.append((experiment.algorithm, experiment.seed))

        def stop(done):
            if len(begun) == 3 and done.round == 1:
                raise KeyboardInterrupt

        return run(experiment, where, [*writers, OnRound(stop)])

    resumed, resume = [], comparison.resume

    def watched_resume(experiment, where, writers):
        resumed.append((experiment.algorithm, experiment.seed))
        return resume(experiment, where, writers)

    monkeypatch.setattr(comparison, "run", watched)
    monkeypatch.setattr(comparison, "resume", watched_resume)
    options = ["--algorithms", "rabo,fedavg", "--seeds", 2, "--rounds", 3, "--clients", 2]
    first = call("compare", "quadratic", *options, "--out", out)
    assert first.exit_code == 130
    assert "the same command with --out" in " ".join(first.output.split())
    assert read(out / "rabo" / "seed-1" / "summary.json")["status"] == "interrupted"
    kept = (out / "rabo" / "seed-0" / "summary.json").read_bytes()
    second = call("compare", "quadratic", *options, "--out", out)
    assert second.exit_code == 0, second.output
    assert begun == [("rabo", 0), ("fedavg", 0), ("rabo", 1), ("fedavg", 1)]
    assert resumed == [("rabo", 1)]
    assert (out / "rabo" / "seed-0" / "summary.json").read_bytes() == kept
    assert read(out / "rabo" / "seed-1" / "summary.json")["rounds"] == 3
    assert read(out / "results.json")["headline"] == "gradient_norm"
    worst = max(
        min(p["value"] for p in c)
        for own in read(out / "results.json")["curves"].values()
        for c in own
    )
    assert read(out / "results.json")["target"] == worst  # a smaller gradient is better


def test_a_folder_of_another_comparison_is_refused(done, tmp_path):
    out, _ = done
    before = (out / "comparison.json").read_bytes()
    found = compare_digits(out, "--alpha", 0.3)
    assert found.exit_code == 1
    assert "comparison with other options (algorithm_options)" in " ".join(found.output.split())
    assert (out / "comparison.json").read_bytes() == before
    (tmp_path / "note").write_text("mine")
    found = compare_digits(tmp_path)
    assert "must be empty or hold a comparison" in " ".join(found.output.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--algorithms", "rabo,fedavgg"], "Did you mean 'fedavg'"),
        (["--algorithms", "rabo,rabo"], "algorithms must differ"),
        (["--seeds", "0"], "seeds must be at least 1"),
        (["--baseline", "fedavg"], "unknown baseline 'fedavg'"),
        (["--levels", "both"], "none of rabo, rafbo has an option 'levels'"),
        (["--algorithms", "rabo,static", "--policy", "rolling"], "fedavg takes any policy"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_runs(tmp_path, options, message):
    out = tmp_path / "out"
    names = [] if "--algorithms" in options else ["--algorithms", "rabo,rafbo"]
    found = call("compare", "quadratic", *names, *options, "--out", out)
    assert found.exit_code == 1
    assert message in " ".join(found.output.split())
    assert not out.exists()


def test_an_option_goes_to_the_algorithms_that_have_it(tmp_path):
    options = ["--seeds", 1, "--rounds", 1, "--clients", 2, "--alpha", 0.01]
    found = call("compare", "quadratic", "--algorithms", "rabo,fedavg", *options, "--out", tmp_path)
    assert found.exit_code == 0, found.output
    configs = [read(tmp_path / n / "seed-0" / "config.json") for n in NAMES]
    assert [c["algorithm_options"] for c in configs] == [{"alpha": 0.01}, {}]
    assert read(tmp_path / "results.json")["algorithms"]["rabo"]["interval"] is None


A = [Point(0.2, 1, 10, 100), Point(0.6, 2, 20, 200), Point(0.5, 3, 30, 300)]
B = [Point(0.5, 2, 25, 150), Point(0.7, 4, 50, 300)]


def test_the_cost_to_a_target_is_that_of_the_first_evaluation_that_reaches_it():
    assert price_of([A], 0.5) == Price(2, 20, 200, 1)
    assert price_of([A, B], 0.5) == Price(2, 22.5, 175, 2)
    assert price_of([A, B], 0.65) == Price(4, 50, 300, 1)  # only one of the seeds gets there
    assert price_of([A, B], 0.8) is None
    assert price_of([A, B], 0.2, falls=True) == Price(1, 10, 100, 1)
    assert price_of([A, B], 0.55, falls=True) == Price(1.5, 17.5, 125, 2)


def test_the_common_target_is_the_best_value_that_all_reach():
    assert common_target([A, B]) == 0.6
    assert common_target([A, B], falls=True) == 0.5


@pytest.mark.parametrize(
    ("number", "quantile"), [(2, 12.7062), (3, 4.3027), (11, 2.2281), (31, 2.0423)]
)
def test_intervals_use_the_tabulated_quantiles_of_students_t(number, quantile):
    values = [float(k * k % 7) for k in range(number)]
    mean = sum(values) / number
    error = (sum((v - mean) ** 2 for v in values) / (number - 1) / number) ** 0.5
    assert confidence(values) == pytest.approx(quantile * error, rel=2e-5)


def test_all_algorithms_are_listed_with_what_they_exchange():
    text = call("algorithms").output
    for name, kind in ALGORITHMS.items():
        assert name in text
        assert getattr(kind, "paper", "not said").split(":")[0] in " ".join(text.split())


OWN = """
import torch
import rabo

def inner(x, y, data):
    return (y["w"] - x["w"] - data).square().sum()

def outer(x, y, data):
    return (y["w"] - data).square().sum()

def problem(partition, num_partitions):
    start = {"w": torch.zeros(2)}
    made = rabo.Problem(inner=inner, outer=outer, x=start, y=start)
    inner_data = torch.full((2,), float(partition))
    return made.on(inner=inner_data, outer=1 + inner_data)
"""


def compare_own(folder, text, *options):
    (folder / "problem.py").write_text(text)
    words = ["--algorithms", "rabo,rafbo", "--seeds", 1, "--rounds", 3, "--clients", 2]
    out = folder / f"out-{len(text)}{len(options)}"
    file = folder / "problem.py"
    return out, call("compare", "own", "--file", file, *words, "--out", out, *options)


@pytest.mark.parametrize("options", [(), ("--target", 100)])
def test_own_problems_are_compared_by_the_mean_outer_loss(tmp_path, options):
    out, found = compare_own(tmp_path, OWN, *options)
    assert found.exit_code == 0, found.output
    results = read(out / "results.json")
    assert results["headline"] == "outer_loss"
    assert results["algorithms"]["rabo"]["to_target"]["rounds"] >= 1
    tensors = {n: load_file(out / "rabo" / "seed-0" / f"{n}.safetensors") for n in ("x", "y")}
    y = tensors["y"]["w"]
    losses = [float((y - (1 + client)).square().sum()) for client in (0, 1)]
    assert results["algorithms"]["rabo"]["value"] == pytest.approx(sum(losses) / 2)


def test_own_problems_may_name_their_headline_metric(tmp_path):
    named = OWN + (
        "\nheadline, falls = 'size', False\n\n"
        "def evaluate(x, y):\n    return {'size': y['w'].norm()}\n"
    )
    out, found = compare_own(tmp_path, named)
    assert found.exit_code == 0, found.output
    results = read(out / "results.json")
    y = load_file(out / "rabo" / "seed-0" / "y.safetensors")["w"]
    assert results["headline"] == "size"
    assert results["algorithms"]["rabo"]["value"] == pytest.approx(float(y.norm()))
    _, found = compare_own(tmp_path, named.replace("'size':", "'length':"))
    assert found.exit_code == 1
    assert "headline 'size'" in " ".join(found.output.split())
