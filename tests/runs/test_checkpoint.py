"""A run that was stopped goes on to the same bits, whatever stopped it."""

import json
import multiprocessing
import random
import signal
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import rabo
from known_problems import federated_quadratics
from rabo.algorithms import RAFBO, Adam, FedBiOAcc, FedMBO, SimFBO
from rabo.cli import app
from rabo.errors import CheckpointError
from rabo.runs.checkpoint import Checkpoints
from rabo.runs.experiment import Experiment, recorded_experiment, resume, run
from watchers import OnRound

ROUNDS = 5
ALGORITHMS = {
    "rabo": rabo.RABO(outer_step=Adam(), policy=rabo.Random(), num_inner_steps=2),
    "rafbo": RAFBO(policy=rabo.Rolling(), calibrate_every=2),
    "fedbioacc": FedBiOAcc(alpha=0.05, num_local_steps=2),
    "fedmbo": FedMBO(num_terms=3, num_inner_steps=2),
    "simfbo": SimFBO(alpha=0.05, policy=rabo.Magnitude()),
}


def federation(name):
    capacities = [1.0, 0.5, rabo.Budget(traffic=500)]
    problems = (replace(p, sigma_f=0.1, sigma_g=0.1) for p in federated_quadratics())
    clients = [rabo.Client(p, c) for p, c in zip(problems, capacities, strict=True)]
    return rabo.Federation(
        clients,
        ALGORITHMS[name],
        participation=0.7,
        evaluate=lambda state, ledger: ledger.summary(),
    )


def without_seconds(tree):
    """Costs and records, but for how long they took."""
    if isinstance(tree, dict):
        return {key: without_seconds(value) for key, value in tree.items() if key != "seconds"}
    return tree


def assert_same(a, b):
    """Bit for bit, and in the same order."""
    trees_a, trees_b = (
        {"x": s.state.x, "y": s.state.y, **s.state.vectors, **{f"t{k}": t for k, t in trained}}
        for s, trained in ((s, s.books.trained.items()) for s in (a, b))
    )
    assert list(trees_a) == list(trees_b)
    for name, tree in trees_a.items():
        assert list(tree) == list(trees_b[name])
        for key, value in tree.items():
            assert torch.equal(value, trees_b[name][key]), (name, key)
            assert value.dtype == trees_b[name][key].dtype
    assert (a.state.round, a.state.scalars) == (b.state.round, b.state.scalars)
    assert a.books.minimum == b.books.minimum
    for one, other in (
        (a.full_cost, b.full_cost),
        (a.books.total, b.books.total),
        *((cost, b.books.by_phase[phase]) for phase, cost in a.books.by_phase.items()),
    ):
        assert one._replace(seconds=0) == other._replace(seconds=0)


def rounds_of(history):
    return [without_seconds(done.as_dict()) for done in history]


@pytest.fixture(scope="module")
def undisturbed():
    found = {}
    for name in ALGORITHMS:
        whole = federation(name)
        found[name] = rounds_of(whole.run(ROUNDS)), whole.snapshot()
    return found


@pytest.mark.parametrize("pause", range(1, ROUNDS))
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run_goes_on_from_a_file_to_the_same_bits_and_record(name, pause, undisturbed, tmp_path):
    history, end = undisturbed[name]
    before, after = federation(name), federation(name)
    checkpoints = Checkpoints(tmp_path, {"name": name}, every=1)
    for _ in before.run(pause):
        checkpoints.add(before.snapshot())
    found = Checkpoints(tmp_path, {"name": name}).latest(after.state, pytest.fail)
    assert_same(found, before.snapshot())
    after.restore(found)
    assert rounds_of(after.run(ROUNDS - pause)) == history[pause:]
    assert_same(after.snapshot(), end)


class StoppedError(RuntimeError):
    pass


def stop_after(rounds):
    def stop(done):
        if done.round + 1 == rounds:
            raise StoppedError

    return [OnRound(stop)]


SMALL = {
    "quadratic": Experiment(task="quadratic", clients=3, rounds=6, participation=0.5),
    "digits": Experiment(
        task="digits",
        task_options={"width": 16},
        clients=3,
        capacities="1,1/2,memory:40kB",
        rounds=4,
        evaluate_every=2,
    ),
    "loss-tuning": Experiment(
        task="loss-tuning",
        task_options={"dataset": "digits", "width": 4},
        algorithm="rafbo",
        clients=2,
        rounds=4,
    ),
    "few-shot": Experiment(
        task="few-shot",
        task_options={
            "backbone": "conv4",
            "channels": "4",
            "tasks": 2,
            "queries": 2,
            "test_tasks": 2,
        },
        clients=2,
        rounds=4,
        runtime="recorded",
    ),
}


def contents(folder):
    """All that a run leaves behind, but for how long it took."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = (folder / "costs.csv").read_text().splitlines()
    seconds = rows[0].split(",").index("seconds")
    return {
        "config": json.loads((folder / "config.json").read_text()),
        "metrics": [without_seconds(json.loads(line)) for line in lines],
        "costs": [[c for i, c in enumerate(r.split(",")) if i != seconds] for r in rows],
        "summary": without_seconds(json.loads((folder / "summary.json").read_text())),
        **{
            f"{level}.{name}": value.tolist()
            for level in ("x", "y")
            for name, value in load_file(folder / f"{level}.safetensors").items()
        },
    }


@pytest.mark.parametrize("task", SMALL)
def test_a_stopped_run_of_any_task_leaves_what_an_undisturbed_one_leaves(task, tmp_path):
    experiment = SMALL[task]
    run(experiment, tmp_path / "whole")
    with pytest.raises(StoppedError):
        run(experiment, tmp_path / "stopped", stop_after(experiment.rounds - 2))
    again = recorded_experiment(tmp_path / "stopped")
    assert again == experiment
    result = resume(again, tmp_path / "stopped")
    assert len(result.history) == experiment.rounds
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


def test_lines_beyond_the_checkpoint_and_half_written_ones_are_cut_off(tmp_path):
    experiment = replace(SMALL["quadratic"], rounds=12, checkpoint_every=10)
    run(experiment, tmp_path / "whole")
    run(replace(experiment, rounds=11), tmp_path / "killed")
    out = tmp_path / "killed"
    (out / "checkpoints" / "round-000000011.safetensors").unlink()
    (out / "summary.json").unlink()
    with (out / "metrics.jsonl").open("a") as metrics, (out / "costs.csv").open("a") as costs:
        metrics.write('{"round": 11, "met')
        costs.write("1")  # of "11,...": must not pass for round 1
    resume(replace(experiment, rounds=12), out)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_run_can_be_given_more_rounds_and_a_finished_one_says_so(tmp_path):
    out = tmp_path / "run"
    run(SMALL["quadratic"], out)
    with pytest.raises(ValueError, match=r"finished after 6 rounds.*--rounds"):
        recorded_experiment(out)
    with pytest.raises(ValueError, match="finished after 6"):
        recorded_experiment(out, 6)
    resume(recorded_experiment(out, 8), out)
    run(replace(SMALL["quadratic"], rounds=8), tmp_path / "whole")
    assert contents(out) == contents(tmp_path / "whole")


def test_it_is_said_that_a_schedule_falls_over_more_rounds_than_before(tmp_path):
    cosine = {"alpha": {"name": "cosine", "start": 0.03}}
    run(replace(SMALL["quadratic"], rounds=4, algorithm_options=cosine), tmp_path / "falls")
    told = []
    resume(recorded_experiment(tmp_path / "falls", 6), tmp_path / "falls", say=told.append)
    assert "with 6 rounds in place of 4, alpha will fall over more rounds" in " ".join(told)
    run(replace(SMALL["quadratic"], rounds=4), tmp_path / "stays")
    told.clear()
    resume(recorded_experiment(tmp_path / "stays", 6), tmp_path / "stays", say=told.append)
    assert not [line for line in told if "fall" in line]


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere"):
        recorded_experiment(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no run"):
        recorded_experiment(tmp_path)
    (tmp_path / "config.json").write_text('{"task": "quadratic", "size": 3, "versions": {}}')
    with pytest.raises(ValueError, match=r"holds no run.*size"):
        recorded_experiment(tmp_path)


def test_an_experiment_that_no_file_could_hold_is_refused(tmp_path):
    experiment = Experiment(task="quadratic", algorithm_options={"policy": rabo.Static()})
    with pytest.raises(ValueError, match="plain options"):
        run(experiment, tmp_path / "run")


def test_fewer_rounds_than_a_run_was_to_do_or_has_done_are_refused_with_advice(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(StoppedError):
        run(SMALL["quadratic"], out, stop_after(4))
    with pytest.raises(ValueError, match=r"to do 6 rounds, got --rounds 2: leave --rounds out"):
        recorded_experiment(out, 2)
    with pytest.raises(ValueError, match=r"has done 4 rounds, got rounds=2: give a larger number"):
        resume(replace(SMALL["quadratic"], rounds=2), out)


def test_a_missing_line_of_the_record_is_noticed(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(StoppedError):
        run(SMALL["quadratic"], out, stop_after(4))
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(lines[:1] + lines[2:]))
    with pytest.raises(CheckpointError, match="must be round 2, got 3"):
        resume(recorded_experiment(out), out)


def moved(folder):
    """Pretend that a run was begun elsewhere."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "ran_on": ["NVIDIA H200"]}))


def test_a_run_goes_on_on_another_device_and_says_so(tmp_path):
    experiment = Experiment(task="quadratic", clients=2, rounds=2, device="auto")
    run(experiment, tmp_path / "moved")
    assert json.loads((tmp_path / "moved" / "config.json").read_text())["ran_on"] == ["CPU"]
    moved(tmp_path / "moved")
    told, again = [], recorded_experiment(tmp_path / "moved", 4, "cpu")
    result = resume(again, tmp_path / "moved", say=told.append)
    assert "begun on NVIDIA H200, goes on on CPU: bits may differ" in told
    config = json.loads((tmp_path / "moved" / "config.json").read_text())
    assert (config["device"], config["ran_on"]) == ("cpu", ["NVIDIA H200", "CPU"])
    told = []
    resume(recorded_experiment(tmp_path / "moved", 6, "auto"), tmp_path / "moved", say=told.append)
    assert not any("bits" in text for text in told)
    whole = run(replace(experiment, rounds=4, device="cpu"), tmp_path / "whole")
    assert result.metrics == whole.metrics


def test_budgets_of_memory_keep_a_run_where_they_were_measured(tmp_path):
    experiment = Experiment(task="quadratic", clients=2, rounds=2, capacities="memory:1GB")
    run(experiment, tmp_path / "kept")
    moved(tmp_path / "kept")
    with pytest.raises(ValueError, match="widths were measured on NVIDIA H200; go on there"):
        resume(recorded_experiment(tmp_path / "kept", 4), tmp_path / "kept")


def test_a_folder_is_for_one_process_at_a_time(tmp_path):
    experiment = Experiment(task="quadratic", clients=2, rounds=3)
    refused = []

    def meddle(done):
        with pytest.raises(ValueError, match="another process is at the run") as caught:
            resume(recorded_experiment(tmp_path / "run"), tmp_path / "run")
        refused.append(caught)

    run(replace(experiment, checkpoint_every=1), tmp_path / "run", [OnRound(meddle)])
    assert refused
    resume(recorded_experiment(tmp_path / "run", 5), tmp_path / "run")  # it is free again


def test_ctrl_c_says_how_to_go_on_and_going_on_works(tmp_path, monkeypatch):
    def run_and_interrupt(chosen, out, writers):
        return run(chosen, out, [OnRound(lambda done: signal.raise_signal(signal.SIGTERM))])

    monkeypatch.setattr("rabo.cli.run.run", run_and_interrupt)
    out = tmp_path / "run"
    arguments = ["run", "quadratic", "--clients", "2", "--rounds", "3", "--out", str(out)]
    before = signal.getsignal(signal.SIGTERM)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 130
    assert f"to go on: rabo resume {out}" in done.output
    again = CliRunner().invoke(app, ["resume", str(out)])
    signal.signal(signal.SIGTERM, before)
    assert again.exit_code == 0, again.output
    assert "goes on after 1 rounds" in again.output
    assert json.loads((out / "summary.json").read_text())["status"] == "finished"
    third = CliRunner().invoke(app, ["resume", str(out)])
    assert third.exit_code == 1
    assert "is finished" in third.output


def test_checkpoints_take_a_twentieth_of_the_time_at_most(tmp_path):
    """By a clock that only writing and rounds move: a write takes 1, a round 4."""
    now = [0.0]
    written = []

    def secure():
        now[0] += 1
        written.append(run_of.state.round)

    run_of = federation("rabo")
    checkpoints = Checkpoints(tmp_path, {}, None, secure, lambda: now[0])
    for _ in run_of.run(12):
        now[0] += 4
        checkpoints.add(run_of.snapshot())
    assert written == [1, 6, 11]  # 19 between writes is 5 rounds
    checkpoints.flush()
    checkpoints.flush()
    assert written == [1, 6, 11, 12]
    names = sorted(path.name for path in checkpoints.folder.iterdir())
    assert names == ["round-000000011.safetensors", "round-000000012.safetensors"]


# damaged and foreign files


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    whole, snapshots = federation("fedbioacc"), {}
    checkpoints = Checkpoints(folder, {"seed": 0}, every=1)
    for _ in whole.run(3):
        checkpoints.add(whole.snapshot())
        snapshots[whole.state.round] = whole.snapshot()
    return folder, snapshots


mutations = st.one_of(
    st.tuples(st.just("truncate"), st.floats(0, 1), st.just(b"")),
    st.tuples(st.just("flip"), st.floats(0, 1), st.binary(min_size=1, max_size=1)),
    st.tuples(st.just("overwrite"), st.floats(0, 1), st.binary(min_size=1, max_size=64)),
    st.tuples(st.just("insert"), st.floats(0, 1), st.binary(min_size=1, max_size=64)),
    st.tuples(st.just("replace"), st.just(0.0), st.binary(max_size=200)),
)


def damaged(data, kind, where, new):
    at = min(int(where * len(data)), len(data) - 1)
    if kind == "truncate":
        return data[:at]
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ (new[0] or 1)]) + data[at + 1 :]
    if kind == "overwrite":
        return data[:at] + new + data[at + len(new) :]
    if kind == "insert":
        return data[:at] + new + data[at:]
    return new


@settings(max_examples=4 * settings.default.max_examples)
@given(data=st.data())
def test_damage_is_noticed_and_the_checkpoint_before_is_used(two_checkpoints, data):
    """Never a crash, never other bits than were written."""
    folder, snapshots = two_checkpoints
    newest = folder / "checkpoints" / "round-000000003.safetensors"
    good, said = newest.read_bytes(), []
    bad = damaged(good, *data.draw(mutations))
    try:
        newest.write_bytes(bad)
        found = Checkpoints(folder, {"seed": 0}).latest(federation("fedbioacc").state, said.append)
    finally:
        newest.write_bytes(good)
    if bad == good:
        assert not said
    else:
        assert "round-000000003.safetensors is damaged" in said[0]
    assert_same(found, snapshots[3 if bad == good else 2])


def test_if_every_checkpoint_is_damaged_the_run_is_not_silently_begun_anew(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(StoppedError):
        run(SMALL["quadratic"], out, stop_after(3))
    for path in (out / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    before = (out / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match="every checkpoint"):
        resume(recorded_experiment(out), out)
    assert (out / "metrics.jsonl").read_bytes() == before


def test_a_checkpoint_of_another_run_version_or_model_is_refused(two_checkpoints, tmp_path):
    folder, _ = two_checkpoints
    like = federation("fedbioacc").state
    with pytest.raises(CheckpointError, match="of another run: seed is 0 there and 1 here"):
        Checkpoints(folder, {"seed": 1}).latest(like, pytest.fail)
    wider = replace(like, y={"y": torch.zeros(9).double()})
    with pytest.raises(
        CheckpointError, match=r"of another model: y\.y must be .*\[9\].* got .*\[4\]"
    ):
        Checkpoints(folder, {"seed": 0}).latest(wider, pytest.fail)
    narrower = replace(like, x={"x": like.x["x"].float()})
    with pytest.raises(CheckpointError, match=r"float32.*float64"):
        Checkpoints(folder, {"seed": 0}).latest(narrower, pytest.fail)
    (tmp_path / "checkpoints").mkdir()
    path = folder / "checkpoints" / "round-000000003.safetensors"
    save_file(load_file(path), tmp_path / "checkpoints" / path.name, {"version": "2"})
    with pytest.raises(CheckpointError, match="must have version 1, got '2'"):
        Checkpoints(tmp_path, {"seed": 0}).latest(like, pytest.fail)


# kill -9

KILLS = 20


def start(context, experiment, out):
    process = context.Process(target=run, args=(experiment, out))
    process.start()
    return process


def num_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
def test_a_run_killed_at_any_moment_goes_on_to_the_same_bits(tmp_path):
    """20 seeded moments, some while a checkpoint is written: every round writes one."""
    # processes that have imported all they need, and have not computed anything yet
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rabo.runs.experiment", "torch._dynamo"])
    experiment = Experiment(
        task="quadratic", clients=3, capacities="1,1/2", rounds=10, checkpoint_every=1
    )
    run(experiment, tmp_path / "whole")
    wanted, moments, num_resumed = contents(tmp_path / "whole"), random.Random(0), 0
    for k in range(KILLS):
        out, rounds = tmp_path / f"killed-{k}", moments.randrange(experiment.rounds - 1)
        process = start(context, experiment, out)
        while num_lines(out / "metrics.jsonl") < rounds and process.is_alive():
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.05))
        process.kill()
        process.join()
        if not (out / "config.json").exists():  # nothing was begun
            run(experiment, out)
        elif not (out / "summary.json").exists():
            num_resumed += 1
            resume(recorded_experiment(out), out)
        assert contents(out) == wanted
    assert num_resumed >= KILLS // 2
