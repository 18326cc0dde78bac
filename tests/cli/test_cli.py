import json
import re
import shlex
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rabo.algorithms import ALGORITHMS
from rabo.cli import app
from watchers import OnRound

runner = CliRunner()


def call(*arguments):
    return runner.invoke(app, [str(a) for a in arguments])


def test_the_version_is_told():
    assert call("--version").output.startswith("rabo ")


WITHOUT_FLOWER = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "flwr" else find(name, *more)
from rabo.cli import app
sys.argv = ["rabo", "flower", "new", "trial", "--clients", "3"]
app()
"""


def test_without_flower_its_command_says_what_to_install():
    done = subprocess.run([sys.executable, "-c", WITHOUT_FLOWER], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'rabo[flower]'" in done.stderr


@pytest.mark.parametrize(
    ("missing", "extra", "words"),
    [
        ("matplotlib.figure", "compare", ["compare", "quadratic", "--rounds", "1", "--seeds", "1"]),
        ("plotly", "report", ["report", "RUN"]),
        ("torch.utils.tensorboard", "tensorboard", ["run", "quadratic", "--tensorboard"]),
        ("mlflow", "mlflow", ["run", "quadratic", "--mlflow"]),
    ],
)
def test_a_missing_extra_is_one_line_that_names_it(tmp_path, monkeypatch, missing, extra, words):
    monkeypatch.chdir(tmp_path)
    call("run", "quadratic", "--rounds", 1, "--clients", 2, "--out", "RUN", "--quiet")
    for name in [name for name in sys.modules if name.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    done = call(*words)
    assert done.exit_code == 1
    [line] = done.stderr.splitlines()
    assert f"pip install 'rabo[{extra}]'" in line


def test_ignored_capacities_are_one_line_of_warning_and_the_run_goes_on(tmp_path):
    run = ("run", "quadratic", "--algorithm", "fednest", "--clients", 2, "--rounds", 2, "--quiet")
    done = call(*run, "--capacities", "1,1/2", "--out", tmp_path / "full")
    assert done.exit_code == 0, done.output
    [line] = [line for line in done.stderr.splitlines() if "warning" in line]
    assert "client 1 has capacity 0.5" in line
    assert "--policy importance" in line
    submodels = call(
        *run, "--capacities", "1,1/2", "--policy", "importance", "--out", tmp_path / "x"
    )
    assert submodels.exit_code == 0
    assert "warning" not in submodels.stderr


def test_a_run_writes_its_folder_with_all_that_a_reader_needs(tmp_path):
    out = tmp_path / "run"
    done = call("run", "quadratic", "--clients", 3, "--rounds", 5, "--seed", 1, "--out", out)
    assert done.exit_code == 0, done.output
    config = json.loads((out / "config.json").read_text())
    assert config["task"] == "quadratic"
    assert config["seed"] == 1
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(5))
    summary = json.loads((out / "summary.json").read_text())
    assert {"task", "algorithm", "seed", "rounds", "metrics", "cost", "coverage"} <= set(summary)
    assert set(summary["cost"]) == {
        "multiply_adds",
        "bytes_up",
        "bytes_down",
        "peak_memory_bytes",
        "seconds",
    }
    assert set(summary["coverage"]) == {"x_min", "y_min", "x_trained", "y_trained"}
    assert summary["status"] == "finished"
    assert summary["metrics"]["gradient_norm"] == lines[-1]["metrics"]["gradient_norm"]
    rows = (out / "costs.csv").read_text().splitlines()
    assert len(rows) == 1 + 5 * 3 * 2
    assert "of the full model" in done.output
    assert f"rabo report {out}" in done.output.replace("\n", "")


def test_the_same_seed_gives_the_same_numbers_and_another_does_not(tmp_path):
    def metrics(name, seed):
        out = tmp_path / name
        call("run", "quadratic", "--clients", 2, "--rounds", 2, "--seed", seed, "--out", out)
        return json.loads((out / "summary.json").read_text())["metrics"]

    assert metrics("a", 0) == metrics("b", 0) != metrics("c", 1)


def test_digits_learns_on_unequal_clients(tmp_path):
    out = tmp_path / "run"
    capacities = "1,1/2,1/4,memory:300kB"
    done = call(
        "run", "digits", "--clients", 4, "--rounds", 12, "--capacities", capacities, "--out", out
    )
    assert done.exit_code == 0, done.output
    summary = json.loads((out / "summary.json").read_text())
    assert summary["metrics"]["accuracy"] > 0.85
    assert summary["cost"]["multiply_adds"] < summary["full_model_cost"]["multiply_adds"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quadratic", "--algorithm", "rabbo"], "Did you mean 'rabo'"),
        (["quadratic", "--capacities", "2"], "must be a fraction of the width in (0, 1]"),
        (["quadratic", "--capacities", "1/0"], "must be a fraction"),
        (["quadratic", "--capacities", "memry:64MB"], "Did you mean 'memory'"),
        (["quadratic", "--clients", "0"], "clients must be at least 1"),
        (["quadratic", "--rounds", "0"], "rounds must be at least 1"),
        (["quadratic", "--policy", "important"], "Did you mean 'importance'"),
        (["quadratic", "--hypergradient", "cg"], "Known:"),
        (["quadratic", "--alpha", "-1"], "alpha must be a positive number"),
        (["quadratic", "--beta", "-1"], "beta must be a positive number"),
        (["quadratic", "--device", "cuda"], "no GPU is available"),
        (["quadratic", "--device", "gpu"], "device must be auto, cpu or cuda"),
        (["quadratic", "--participation", "0"], "participation must lie"),
        (["quadratic", "--capacities", ""], "capacities must name at least one"),
        (["quadratic", "--evaluate-every", "0"], "evaluate_every must be at least 1"),
        (["quadratic", "--min-replies", "11"], "at most the number of clients, 10"),
        (["quadratic", "--dim-x", "0"], "dim_x must be at least 1"),
        (["digits", "--width", "0"], "width must be at least 1"),
        (["digits", "--option", "momentum=abc"], "momentum must be a number, got 'abc'"),
        (["digits", "--option", "num_inner_steps=1.5"], "num_inner_steps must be a whole number"),
        (["digits", "--runtime", "fast"], "Known: auto, grouped, plain, recorded"),
        (["few-shot", "--ways", "1"], "ways must be at least 2"),
        (["few-shot", "--channels", "wide"], "channels must be widths such as 64,160,320,640"),
        (["few-shot", "--dataset", "omniglot", "--data-root", "/nowhere"], "use --download"),
    ],
)
def test_a_wrong_argument_gives_one_clear_line_and_no_traceback(tmp_path, arguments, message):
    done = call("run", *arguments, "--out", tmp_path / "run")
    text = " ".join(done.output.split())
    assert done.exit_code == 1
    assert message in text
    assert "Traceback" not in text


def test_a_python_file_in_place_of_a_task_is_an_own_problem(tmp_path):
    problem = Path(__file__).parents[2] / "src" / "rabo" / "flower" / "template" / "problem.py"
    out = tmp_path / "run"
    done = call("run", problem, "--clients", 2, "--rounds", 1, "--out", out)
    assert done.exit_code == 0, done.output
    config = json.loads((out / "config.json").read_text())
    assert (config["task"], config["task_options"]) == ("own", {"file": str(problem)})


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["run", "digit"], "digits"),
        (["run", "digits", "--roundss", "3"], "--rounds"),
        (["run", "digits", "--option", "num_iner_steps=3"], "num_inner_steps"),
        (["compare", "digits", "--algoritms", "rabo"], "--algorithms"),
    ],
)
def test_a_typo_is_refused_and_the_right_name_suggested(tmp_path, monkeypatch, words, meant):
    monkeypatch.chdir(tmp_path)
    done = call(*words)
    assert done.exit_code in (1, 2)
    assert re.search(rf"(?<![\w-]){meant}(?![\w])", done.output)
    assert list(tmp_path.iterdir()) == []


def test_an_option_by_name_is_the_flag_and_both_are_refused(tmp_path):
    given = ("run", "digits", "--rounds", 1, "--clients", 2, "--option", "num_inner_steps=3")
    assert call(*given, "--out", tmp_path / "run").exit_code == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["algorithm_options"] == {"num_inner_steps": 3}
    twice = call(*given, "--inner-steps", 4, "--out", tmp_path / "twice")
    assert twice.exit_code == 2
    assert "num_inner_steps must be given once" in " ".join(twice.output.split())


def test_a_file_in_the_way_of_a_folder_gives_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        done = call("run", "quadratic", "--clients", 2, "--rounds", 1, "--out", out)
        assert done.exit_code == 1
        assert "a file is in the way" in " ".join(done.output.split())


def test_a_folder_without_a_run_cannot_be_resumed_and_says_which_can(tmp_path):
    done = call("resume", tmp_path)
    assert done.exit_code == 1
    assert "give the folder that the run named" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("rabo re", "resume"),
        ("rabo run ", "quadratic"),
        ("rabo run digits --alg", "--algorithm"),
        ("rabo run digits --algorithm fedm", "fedmbo"),
        ("rabo run digits --policy ro", "rolling"),
        ("rabo algorithms dist-m", "dist-maml"),
    ],
)
def test_the_tab_key_completes_commands_options_and_names(words, completed):
    asked = {"_RABO_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": words}
    done = runner.invoke(app, [], env=asked, prog_name="rabo")
    assert f'"{completed}"' in done.output


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_option_of_an_algorithm_is_listed_with_its_default(name):
    done = call("algorithms", name)
    assert done.exit_code == 0
    first = {line.split()[0]: line.split()[1:] for line in done.output.splitlines() if line.split()}
    plain = ALGORITHMS[name]()
    for option in fields(plain):
        default = getattr(plain, option.name)
        shown = first[option.name][0]
        if isinstance(default, (int, float, str)):
            assert shown == str(default)
        else:
            assert str(default).startswith(shown.rstrip("…"))
    assert "rolling" in done.output


def test_an_unknown_algorithm_has_no_options_and_says_which_may_be_meant():
    done = call("algorithms", "fedmob")
    assert done.exit_code == 2
    assert "Did you mean 'fedmbo'" in " ".join(done.output.split())


def test_a_beta_that_is_no_number_is_refused(tmp_path):
    done = call("run", "quadratic", "--beta", "small", "--out", tmp_path / "run")
    assert done.exit_code == 2
    assert "must be a number or auto" in " ".join(done.output.split())


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path):
    first = call("run", "quadratic", "--clients", 2, "--rounds", 1, "--out", tmp_path / "run")
    before = (tmp_path / "run" / "summary.json").read_text()
    second = call("run", "quadratic", "--clients", 2, "--rounds", 2, "--out", tmp_path / "run")
    assert (first.exit_code, second.exit_code) == (0, 1)
    assert "already holds a run" in " ".join(second.output.split())
    assert (tmp_path / "run" / "summary.json").read_text() == before


def test_a_run_does_not_write_among_other_files(tmp_path):
    (tmp_path / "note").write_text("mine")
    found = call("run", "quadratic", "--rounds", 1, "--out", tmp_path)
    assert found.exit_code == 1
    assert "must be empty or not there yet" in " ".join(found.output.split())
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def test_ctrl_c_keeps_the_rounds_that_were_done(tmp_path, monkeypatch):
    def stop_after_three(done):
        if done.round == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("rabo.cli.follow.view_of", lambda *_: [OnRound(stop_after_three)])
    out = tmp_path / "a run"
    done = call("run", "quadratic", "--clients", 2, "--rounds", 5, "--out", out, "--quiet")
    assert done.exit_code == 130
    assert "interrupted" in done.output
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 3
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["rounds"] == 3
    monkeypatch.undo()
    command = shlex.split(done.output.partition("to go on: ")[2])
    assert command == ["rabo", "resume", str(out), "--quiet"]
    assert call(*command[1:]).exit_code == 0
    assert json.loads((out / "summary.json").read_text())["rounds"] == 5


def test_ctrl_c_before_anything_is_made_asks_for_the_same_command(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("rabo.cli.run.run", interrupt)
    done = call("run", "quadratic", "--out", tmp_path / "run")
    assert done.exit_code == 130
    assert "give the same command again" in " ".join(done.output.split())


def test_quiet_prints_the_result_alone(tmp_path):
    options = ("quadratic", "--clients", 2, "--rounds", 3)
    loud = call("run", *options, "--out", tmp_path / "a").output
    quiet = call("run", *options, "--out", tmp_path / "b", "--quiet").output
    assert "making data" in loud
    assert "round 3/3" in loud
    assert "making data" not in quiet
    assert "round 3/3" not in quiet
    assert "of the full model" in quiet


def test_a_run_that_diverges_fails_with_client_and_round_and_keeps_its_record(tmp_path):
    out = tmp_path / "run"
    done = call("run", "quadratic", "--beta", 1000, "--rounds", 400, "--out", out)
    assert "exceeds 2/l_g1" in done.stderr
    text = " ".join(done.output.split())
    assert done.exit_code == 1
    assert "failed in round" in text
    assert json.loads((out / "summary.json").read_text())["status"] == "failed"


def test_help_names_every_task_and_its_own_options():
    assert "digits" in call("run", "--help").output
    assert "dim-x" in call("run", "quadratic", "--help").output


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "rabo", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert "bilevel" in done.stdout


def test_a_run_that_is_told_to_end_keeps_its_record(tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "rabo", "run", "quadratic", "--rounds", "100000"]
    process = subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").stat().st_size:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.terminate()
        assert process.wait(timeout=30) == 130
    finally:
        process.kill()
        process.wait()
    assert json.loads((out / "summary.json").read_text())["status"] == "interrupted"


def test_check_of_an_example_and_of_a_problem_file_passes():
    folder = Path(__file__).parents[2]
    done = call("check", folder / "docs" / "examples" / "feature_penalties.py")
    assert done.exit_code == 0, done.output
    assert "4 of 4 clients" in done.output
    assert "algorithm='simrabo'" in done.output  # few rows per client: they differ
    problem = folder / "src" / "rabo" / "flower" / "template" / "problem.py"
    done = call("check", problem, "--clients", 3, "--seed", 1)
    assert done.exit_code == 0, done.output
    assert "3 of 3 clients" in done.output


BROKEN = """
import rabo, torch

def inner(x, y, data):
    return (y["y"] - x["x"]).square().sum()

def outer(x, y, data):
    return x["x"].square().sum()

def problem(partition, num_partitions):
    start = torch.ones(2)
    made = rabo.Problem(inner=inner, outer=outer, x={"x": start}, y={"y": 0 * start})
    return made.on(inner=None, outer=None)
"""


def test_check_of_a_broken_problem_exits_with_1_and_of_a_bad_file_with_2(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    done = call("check", tmp_path / "broken.py")
    assert done.exit_code == 1
    assert "does not depend on y" in done.output
    (tmp_path / "empty.py").write_text("")
    for name, message in {"empty.py": "problem(partition", "none.py": "is not there"}.items():
        done = call("check", tmp_path / name)
        assert done.exit_code == 2
        assert message in " ".join(done.output.split())
        assert "Traceback" not in done.output
