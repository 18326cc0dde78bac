"""Every benchmark runs, writes what it promises, and compares things that are equal."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import rounds
from benchmarks.__main__ import main
from benchmarks.catalogue import MEASURED, SCRIPTS
from benchmarks.clients import peak_bytes
from benchmarks.hypergradients import contestants, dense, flat, plain
from benchmarks.parts import peers
from benchmarks.parts.machine import Machine, Traffic
from benchmarks.parts.problems import few_shot, logistic
from benchmarks.parts.report import Finding, Target, table
from benchmarks.parts.timing import Setting, interleave, ratio

COLUMNS = {
    "hypergradients": {"problem", "system", "version", "ms", "x plain", "rabo / it", "error"},
    "estimators": {"problem", "estimator", "K", "error", "x time", "x multiply-adds", "x memory"},
    "rounds": {"round", "ms", "x rabo at 1", "x fedmbo", "rounds per second"},
    "runtimes": {"round", "runtime", "ms", "x plain", "largest difference in x"},
    "clients": {"clients", "ms per client", "peak MB", "x ms per client", "x peak MB"},
    "memory": {"algorithm", "outer images", "ms", "x RABO's time", "x RABO's peak"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
def test_a_benchmark_prints_ratios_and_writes_them(name, tmp_path, capsys):
    arguments = [name, "--quick", "--repeats", "1", "--device", "cpu"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / f"{name}.json").read_text())
    assert content["benchmark"] == name
    assert content["setting"]["quick"]
    assert content["machine"]["Gflop/s of a matrix product"] > 0
    assert content["machine"]["GB/s of a copy"] > 0
    for row in content["rows"]:
        assert row.keys() >= COLUMNS[name]
        ratios = [v for k, v in row.items() if k.startswith("x ") or k == "rabo / it"]
        assert all(v > 0 for v in ratios if v is not None)
    assert content["targets"] == []  # limits are not for problems so small
    assert "min of one core" not in capsys.readouterr().out
    check = {
        "hypergradients": same_answers,
        "estimators": counted_products,
        "runtimes": same_bits,
        "memory": rafbo_holds_less,
    }
    check.get(name, lambda rows: None)(content["rows"])


def test_what_is_measured_in_full_says_how_long_it_takes_and_what_it_must_show(tmp_path, capsys):
    asked = ["clients", "--clients", "50", "--repeats", "1", "--device", "cpu"]
    assert main([*asked, "--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert f"clients (about {MEASURED['clients'].minutes} min of one core)" in output
    content = json.loads((tmp_path / "clients.json").read_text())
    assert [row["clients"] for row in content["rows"]] == [10]
    assert all(t["met"] == (t["value"] <= t["limit"]) for t in content["targets"])
    assert [t["what"] for t in content["targets"]] == [
        "largest time per client",
        "largest peak memory",
    ]
    for target in content["targets"]:
        assert target["what"] in output


@pytest.mark.slow
def test_rounds_have_limits_in_milliseconds_where_these_were_set():
    setting = Setting(quick=True, repeats=1, backbone="resnet12")
    here = Machine({"device": "NVIDIA H200"}, 1e12, 1e9)
    _, *limits = rounds.measure(setting, here).targets
    assert [(t.what, t.limit) for t in limits] == [
        ("rabo at 1,1/2,1/4,1/8,1/16, ms", 60.0),
        ("fedmbo at 1, ms", 160.0),
    ]
    elsewhere = here._replace(facts={"device": "another"})
    assert len(rounds.measure(setting._replace(backbone="conv4"), here).targets) == 1
    assert len(rounds.measure(setting, elsewhere).targets) == 1


def same_answers(rows):
    """What solves the same system to the same depth has the same error, up to float32's rounding.

    On B ten iterations solve the system, and what is left is rounding, which differs by processor.
    """
    for problem in ("A", "B"):
        errors = {row["system"]: row["error"] for row in rows if row["problem"] == problem}
        bar = pytest.approx(errors["plain autograd"], rel=0.1, abs=1e-5)
        assert errors["rabo ConjugateGradient"] == bar
        assert errors["rabo Unrolled"] == pytest.approx(errors["rabo Neumann"], rel=0.1)


def counted_products(rows):
    """On A the gradient of f costs two passes over the data, and every product as much."""
    per_iteration = {"ConjugateGradient": 1, "Neumann": 1, "DirectionalDifference": 2}
    for row in rows:
        if row["problem"] == "A" and row["estimator"] in per_iteration:
            expected = 2 + per_iteration[row["estimator"]] * row["K"]
            assert row["x multiply-adds"] == pytest.approx(expected, rel=0.02)
    for problem in ("A", "B"):
        errors = {
            (row["estimator"], row["K"]): row["error"] for row in rows if row["problem"] == problem
        }
        assert errors["ConjugateGradient", 30] < 1e-3 < errors["ConjugateGradient", 1]
        assert errors["Unrolled", 30] == pytest.approx(errors["Neumann", 30], rel=0.1)


def same_bits(rows):
    """But for clients that are asked as one: their sums have another order, see test_recorded."""
    assert {row["runtime"] for row in rows} == {"plain", "recorded", "grouped"}
    assert all(row["largest difference in x"] == 0 for row in rows if row["runtime"] != "grouped")


def rafbo_holds_less(rows):
    """Differences hold one graph where second derivatives hold it and that of the gradient."""
    for row in rows:
        if row["algorithm"] == "RAFBO" and row["outer images"] == 64:
            assert row["x RABO's peak"] < 0.6
    held = {(row["classifier"], row["outer images"]): row["∇f MB"] for row in rows}
    for classifier, number in held:
        if number == 256:  # four times the images
            assert held[classifier, 256] > 3 * held[classifier, 64]


@pytest.mark.parametrize(
    ("words", "message"),
    [(["round"], "Did you mean 'rounds'"), (["rounds", "--backbone", "conv"], "'conv4'")],
)
def test_an_unknown_name_is_an_error_with_the_nearest_known_name(words, message, tmp_path, capsys):
    assert main([*words, "--quick", "--out", str(tmp_path)]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--repeats", "--threads"])
def test_a_number_out_of_range_is_an_error_that_names_the_option(option, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["rounds", option, "0"])
    assert option in capsys.readouterr().err


def test_every_benchmark_of_the_folder_is_listed(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = {line.split()[0] for line in lines if line.startswith("  ")}
    folder = Path(__file__).parents[2] / "benchmarks"
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__", "catalogue"}
    assert listed == files == MEASURED.keys() | SCRIPTS.keys()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_explains_its_arguments(name, capsys):
    if name in ("adaptation", "convolutions"):
        pytest.importorskip("triton")
    if name == "flower":
        pytest.importorskip("flwr")
    assert main([name, "--help"]) == 0
    assert f"python -m benchmarks {name}" in capsys.readouterr().out
    takes_any_number = name in ("multiply_adds", "replays")
    assert main([name, *([] if takes_any_number else ["too many"] * 9)]) == 2


@pytest.mark.parametrize("make", [lambda: logistic(20), lambda: few_shot(4)])
def test_the_plain_losses_are_those_of_the_problem(make):
    case = make()
    x, y = list(case.x.values()), list(case.y.values())
    for level, loss in (("inner", case.inner), ("outer", case.outer)):
        part = getattr(case.batch, level)
        value = getattr(case.problem, level)(case.problem.features(case.x, part), case.y, part)
        assert loss(x, y) == pytest.approx(float(value), rel=1e-5)


def test_the_bar_run_long_gives_the_dense_hypergradient():
    case = logistic(20, dtype=torch.float64)
    truth = flat(dense(case.inner, case.outer, list(case.x.values()), list(case.y.values())))
    found = flat(plain(case, num_iterations=30))
    assert (found - truth).norm() < 1e-8 * truth.norm()


@pytest.mark.parametrize("name", peers.PEERS)
@pytest.mark.filterwarnings("ignore")
def test_a_peer_that_is_installed_is_asked_for_the_same_hypergradient(name):
    peer = peers.PEERS[name]
    if not peer.version:
        pytest.skip(f"{peer.package} is not installed")
    case = logistic(20, dtype=torch.float64)
    like = "rabo Unrolled" if name == "higher" else "rabo ConjugateGradient"
    ours, theirs = flat(contestants(case)[like]()), flat(peer.prepare(case)())
    if name != "Betty":  # whose conjugate gradients take the residual of the step before
        assert (ours - theirs).norm() < 1e-6 * ours.norm()
    assert theirs.isfinite().all()


def test_betty_is_called_with_the_arguments_of_its_release_0_2(monkeypatch):
    def get_grads(loss, path, retain_graph, do_sync):  # its signature and what it reads of a path
        upper, lower, _ = path
        assert upper._strategy != "fsdp"
        assert do_sync is False
        x, y = upper.trainable_parameters(), lower.meta_trainable_parameters()
        outer = torch.autograd.grad(loss, y, retain_graph=retain_graph)
        slope = torch.autograd.grad(lower.training_step_exec(lower.cur_batch), y, create_graph=True)
        rows = [torch.autograd.grad(slope, y, [row], retain_graph=True)[0] for row in torch.eye(20)]
        v = torch.linalg.solve(torch.stack(rows), outer[0])
        return [-cross for cross in torch.autograd.grad(slope, x, [v])]

    released = SimpleNamespace(get_grads=get_grads, Config=SimpleNamespace)
    monkeypatch.setattr(peers, "import_module", lambda name: released)
    case = logistic(20)
    found = flat(peers.betty(case)())
    truth = flat(dense(case.inner, case.outer, list(case.x.values()), list(case.y.values())))
    torch.testing.assert_close(found, truth)


def test_the_peak_of_a_process_is_its_own_and_not_that_of_the_one_that_made_it():
    ballast = torch.ones(2**27)  # half a gigabyte
    command = "from benchmarks.clients import peak_bytes; print(peak_bytes())"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, check=True)
    assert 0 < int(done.stdout) < peak_bytes() - ballast.nbytes / 2


def test_floors_count_products_and_what_kernels_touch_but_not_views():
    a, b = torch.ones(30, 20), torch.ones(20, 10)
    machine = Machine({}, flops=1e3, bandwidth=1e3)
    floors = machine.floors(lambda: (a.t().t() @ b).add_(1))
    assert floors["operations floor ms"] == 2 * 30 * 20 * 10
    with Traffic() as traffic:
        a.t().reshape(-1)[:5]
    copied = 2 * 4 * a.numel()  # to reshape a transposed matrix is to copy it
    assert traffic.num_bytes == copied
    touched = 4 * (30 * 20 + 20 * 10 + 30 * 10) + 2 * 4 * 30 * 10
    assert floors["bytes floor ms"] == touched


def test_contestants_take_turns_and_each_starts_some():
    seen = []
    work = {name: lambda name=name: seen.append(name) for name in "abc"}
    times = interleave(work, Setting(repeats=3), repeats=99, warmup=0)
    assert [len(each) for each in times.values()] == [3, 3, 3]
    assert "".join(seen) == "abcbcacab"
    assert ratio([1.0, 2.0, 9.0], [2.0, 4.0, 3.0]) == 0.5


def test_a_report_says_what_was_met_and_leaves_a_dash_where_nothing_is_known():
    rows = [{"name": "a", "error": 2e-5, "n": 1000}, {"name": "b", "error": None, "n": 2}]
    text = Finding(rows, [Target("a over b", 1.2, 1.0)], ["a note"]).text()
    assert "| a    | 2.0e-05 | 1,000 |" in text
    assert "| b    | –       | 2     |" in text
    assert "a over b: 1.200, at most 1: missed" in text
    assert table(rows) in text
