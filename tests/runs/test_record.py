"""What the folder of a run says of its rounds."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rabo
from known_problems import federated_quadratics
from rabo.algorithms import SimFBO
from rabo.federation.federation import Federation
from rabo.federation.rounds import Round
from rabo.runs.experiment import Experiment, recorded_experiment, resume, run
from rabo.runs.record import code_of, versions
from watchers import OnRound

DIGITS = Experiment(
    task="digits",
    task_options={"width": 16},
    algorithm_options={"num_inner_steps": 2, "policy": "static"},
    clients=4,
    capacities="1,1/2,1/4,memory:1kB",
    rounds=3,
    evaluate_every=2,
)


def coverage(folder):
    return [json.loads(line) for line in (folder / "coverage.jsonl").read_text().splitlines()]


def test_channels_are_counted_at_evaluations_for_x_and_y(tmp_path):
    """Static masks keep the first channels: three clients hold a quarter, two a half, one all."""
    run(DIGITS, tmp_path / "run")
    counts = [3] * 4 + [2] * 4 + [1] * 8
    layers = {"x.0": counts, "x.3": counts}
    assert coverage(tmp_path / "run") == [
        {"round": 1, "x": layers, "y": {"x.3": counts}},
        {"round": 2, "x": layers, "y": {"x.3": counts}},
    ]


def test_channels_that_nobody_trains_are_not_counted(tmp_path):
    """FedAvg trains y alone where it is told so."""
    options = {"levels": "y", "num_inner_steps": 2, "policy": "static"}
    run(replace(DIGITS, algorithm="fedavg", algorithm_options=options), tmp_path / "run")
    assert [line["x"] for line in coverage(tmp_path / "run")] == [{}, {}]


@pytest.mark.parametrize("many", [False, True], ids=["few parts", "more parts than are remembered"])
def test_random_channels_are_counted_one_client_at_a_time(many):
    problems = federated_quadratics()
    clients = [rabo.Client(problems[i % len(problems)], 0.5) for i in range(40 if many else 3)]
    algorithm = rabo.RABO(policy=rabo.Random(), beta=0.01, alpha=0.01)
    federation = Federation(clients, algorithm, evaluate=lambda *_: {})
    [done] = federation.run(1)
    for level in ("x", "y"):
        [(_, counts)] = done.channels[level].items()
        kept = -(-len(counts) // 2)
        assert sum(counts) == kept * len(clients)
        held = [number for number in counts if number]
        covered = done.coverage[level]
        assert (min(held), len(held)) == (covered.minimum, covered.num_trained)


def test_single_entries_are_counted_by_the_rows_of_tensors():
    clients = [rabo.Client(problem, 0.5) for problem in federated_quadratics()]
    algorithm = rabo.RABO(policy=rabo.Magnitude(), beta=0.01, alpha=0.01)
    federation = Federation(clients, algorithm, evaluate=lambda *_: {})
    [done] = federation.run(1)
    number = sum(sum(rows) for rows in done.channels["x"].values())
    assert number == len(clients) * done.coverage["x"].num_trained


def test_a_run_that_was_stopped_has_the_same_coverage_on_record(tmp_path):
    def stop(done):
        if done.round == 1:
            raise KeyboardInterrupt

    run(DIGITS, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(DIGITS, tmp_path / "stopped", [OnRound(stop)])
    with (tmp_path / "stopped" / "coverage.jsonl").open("a") as file:
        file.write('{"round":2,"x":{"x.0"')  # what a killed process leaves
    resume(recorded_experiment(tmp_path / "stopped"), tmp_path / "stopped")
    assert coverage(tmp_path / "stopped") == coverage(tmp_path / "whole")


@pytest.mark.parametrize(
    "algorithm",
    [
        rabo.RABO(alpha=0.05, warm_up=1),
        SimFBO(alpha=0.05, warm_up=1, num_local_steps=[1, 3], policy=rabo.Static()),
    ],
    ids=["rabo", "simfbo"],
)
def test_the_hypergradient_is_as_long_as_the_step_on_x_over_its_size(algorithm):
    problems = federated_quadratics()
    clients = [rabo.Client(p, c) for p, c in zip(problems, (1.0, 0.5, 0.5), strict=False)]
    federation = Federation(clients, algorithm)
    before = federation.state.x
    for done in federation.run(3):
        after = federation.state.x
        way = torch.cat([(after[name] - before[name]).flatten() for name in after])
        before = after
        norm = done.metrics.get("hypergradient_norm")
        if done.round == 0:
            assert norm is None  # x has not moved yet
        else:
            assert norm == pytest.approx(float(way.norm()) / 0.05, rel=1e-9)


def test_a_round_says_what_was_spent_so_far(tmp_path):
    result = run(DIGITS, tmp_path / "run")
    last = result.history[-1]
    assert last.total == result.cost
    assert last.relative_cost == result.relative_cost
    added = [sum(done.cost.bytes_up for done in result.history[: i + 1]) for i in range(3)]
    measured = result.cost.bytes_up - added[-1]  # before the first round
    assert [done.total.bytes_up - measured for done in result.history] == added


def test_loss_tuning_records_its_loss_and_every_class(tmp_path):
    experiment = Experiment(
        task="loss-tuning",
        task_options={"width": 2},
        algorithm_options={"num_inner_steps": 1, "warm_up": 0},
        clients=2,
        rounds=2,
        evaluate_every=1,
    )
    result = run(experiment, tmp_path / "run")
    first, last = result.history
    written = json.loads((tmp_path / "run" / "loss.json").read_text())
    for name in ("w", "l", "delta", "accuracy_per_class"):
        assert last.vectors[name] == pytest.approx(written[name])
    assert first.vectors["l"] != last.vectors["l"]
    mean = sum(last.vectors["accuracy_per_class"]) / 10
    assert last.metrics["balanced_accuracy"] == pytest.approx(mean)
    assert [Round.from_dict(d.as_dict()).vectors for d in result.history] == [
        first.vectors,
        last.vectors,
    ]


def test_a_folder_that_a_killed_process_had_only_begun_is_taken_again(tmp_path):
    (tmp_path / ".config.json.partial").write_text('{"task": ')
    run(Experiment(task="quadratic", rounds=1, device="cpu"), tmp_path)
    assert (tmp_path / "summary.json").exists()


def test_what_computes_is_on_record(tmp_path):
    run(Experiment(task="quadratic", rounds=1, device="cpu"), tmp_path)
    for name in ("config", "summary"):
        recorded = json.loads((tmp_path / f"{name}.json").read_text())["versions"]
        assert recorded == versions()
        assert len(recorded["code"]) == 12


def test_another_line_of_code_is_another_version(tmp_path):
    package = Path(rabo.__file__).parent
    copy = tmp_path / "rabo"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert code_of(copy) == code_of(package) == versions()["code"]
    (copy / "seeding.py").write_text((copy / "seeding.py").read_text() + "# more\n")
    assert code_of(copy) != code_of(package)
