"""Clipping and noise happen on the client, are what they say, and can be repeated."""

import json

import pytest
import torch
from typer.testing import CliRunner

import rabo
from known_problems import federated_quadratics
from rabo.algorithms import FedNest
from rabo.cli import app
from rabo.execution import Answer, ClientContext, InProcess, Recorded, Request
from rabo.federation.federation import Federation
from rabo.seeding import stream
from rabo.tree import squared_norm


class Sent(InProcess):
    """Remembers the arrays of all replies by round, work and client, in order."""

    def map(self, work, requests):
        self.seen = getattr(self, "seen", [])
        for reply in super().map(work, requests):
            self.seen.append((work.name, reply.client, reply.arrays))
            yield reply


def run(privacy, algorithm=None, rounds=2, kind=Sent):
    problems = federated_quadratics()
    clients = [rabo.Client(problem, c) for problem, c in zip(problems, [1, 0.5, 1], strict=True)]
    runtime = kind(dict(enumerate(problems)))
    algorithm = algorithm or rabo.RABO(num_inner_steps=2)
    federation = Federation(clients, algorithm, runtime=runtime, privacy=privacy)
    list(federation.run(rounds))
    return federation.state, runtime


def test_an_answer_longer_than_the_bound_is_shrunk_to_it_and_a_shorter_one_is_untouched():
    _, plain = run(None, rounds=1)
    norms = [float(squared_norm(a).sqrt()) for _, _, a in plain.seen if a]
    bound = sorted(norms[:3])[1]  # of the first exchange, in which nobody has been clipped yet
    _, clipped = run(rabo.Privacy(clip=bound), rounds=1)
    pairs = [(a, b) for (_, _, a), (_, _, b) in zip(plain.seen, clipped.seen, strict=True) if a]
    for before, after in pairs[:3]:
        norm = float(squared_norm(before).sqrt())
        shrink = min(1.0, bound / norm)
        for name, value in before["y"].items():
            torch.testing.assert_close(after["y"][name], shrink * value)
            if norm <= bound:
                assert torch.equal(after["y"][name], value)
    assert all(float(squared_norm(a).sqrt()) <= bound * (1 + 1e-12) for _, a in pairs)
    assert max(norms[:3]) > bound


def test_a_bound_that_nobody_reaches_changes_no_bit():
    plain, _ = run(None)
    clipped, _ = run(rabo.Privacy(clip=1e9))
    assert torch.equal(plain.x["x"], clipped.x["x"])


def test_noise_has_the_deviation_it_says_and_is_independent_between_answers():
    """Two answers of two clients in 200 rounds: eight entries of noise alone, as columns."""
    privacy = rabo.Privacy(clip=2.0, noise_multiplier=0.5)
    nothing, rows = Answer({"y": {"y": torch.zeros(2).double()}}), []
    for round in range(200):
        clients = [ClientContext(client, federated_quadratics(1)[0]) for client in range(2)]
        request = Request(0, 0, round, None, {})
        sent = [privacy(nothing, request, own, "work") for own in clients for _ in range(2)]
        rows.append(torch.cat([reply.arrays["y"]["y"] for reply in sent]))
    drawn = torch.stack(rows)
    assert float(drawn.std()) == pytest.approx(1.0, abs=0.1)  # 1600 draws: 4 deviations
    correlation = torch.corrcoef(drawn.T) - torch.eye(drawn.shape[1])
    assert float(correlation.abs().max()) < 0.3  # 200 rounds: 4 deviations


def test_noise_is_never_the_same_twice_in_a_round_and_can_be_repeated():
    algorithm = FedNest(num_inner_steps=3, num_local_steps=1, num_terms=1, policy=rabo.Static())
    noisy = rabo.Privacy(clip=1e-9, noise_multiplier=1e9)  # noise alone is left
    state, sent = run(noisy, algorithm, 2)
    values = [v for _, _, a in sent.seen if a for t in a.values() for v in next(iter(t.values()))]
    assert len(set(map(float, values))) == len(values)
    again, _ = run(noisy, algorithm, 2)
    assert torch.equal(state.y["y"], again.y["y"])
    private = rabo.Privacy(clip=1e-9, noise_multiplier=1e9, seed=17)
    other, _ = run(private, algorithm, 2)
    assert not torch.equal(state.y["y"], other.y["y"])


def test_the_noise_of_the_runs_seed_can_be_taken_off_and_that_of_a_secret_one_cannot():
    """Why docs/privacy.md asks for a seed of the client's own."""

    def guess(seed):
        privacy = rabo.Privacy(clip=1.0, noise_multiplier=3.0, seed=seed)
        _, noisy = run(privacy, rounds=1)
        return noisy.seen[3][2]["y"]["y"] - 3.0 * torch.randn(
            4, generator=stream(0, 0, 0, "noise 0 update_inner"), dtype=torch.float64
        )

    _, plain = run(rabo.Privacy(clip=1.0), rounds=1)
    name, client, sent = plain.seen[3]
    assert (name, client) == ("update_inner", 0)
    torch.testing.assert_close(guess(None), sent["y"]["y"])
    assert float((guess(99) - sent["y"]["y"]).norm()) > 1


@pytest.mark.parametrize("multiplier", [0.0, 0.5])
def test_recorded_work_is_protected_like_plain_work(multiplier):
    task = rabo.tasks.TASKS["few-shot"](
        backbone="conv4", channels="4", tasks=2, queries=2, test_tasks=2
    )
    clients = task.build([1.0, 0.5], 4, 0, "cpu").clients
    problems = {i: client.problem for i, client in enumerate(clients)}
    states = []
    for kind in (InProcess, Recorded):
        federation = Federation(
            clients,
            rabo.RABO(num_inner_steps=2, calibrate_every=2),
            runtime=kind(problems),
            privacy=rabo.Privacy(clip=0.05, noise_multiplier=multiplier),
        )
        list(federation.run(4))
        states.append(federation.state)
    assert all(torch.equal(v, states[1].x[k]) for k, v in states[0].x.items())


def test_the_record_names_the_multiplier_and_what_was_dropped(tmp_path):
    def call(*arguments):
        return CliRunner().invoke(app, ["run", "quadratic", *map(str, arguments)])

    out = tmp_path / "run"
    options = ["--clip", 1, "--noise-multiplier", 0.1, "--aggregate", "median"]
    checks = ["--on-fault", "drop", "--min-replies", 2, "--max-norm", 1e-6]
    sizes = ["--clients", 3, "--rounds", 2]
    done = call(*sizes, *options, *checks, "--out", out)
    assert done.exit_code == 0, done.output
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["clip"], summary["noise_multiplier"]) == (1.0, 0.1)
    assert summary["rounds_skipped"] == 2
    assert summary["answers_not_used"] == 6
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert {fault["phase"] for fault in lines[0]["faults"]} == {"update_inner"}
    assert "must be finite and at most 1e-06" in lines[0]["faults"][0]["why"]
    text = " ".join(done.output.split())
    assert "6 of clients [0, 1, 2] (the last in round 2 at update_inner" in text
    assert "rounds given up 2" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip": 0.0}, "clip must be positive"),
        ({"clip": float("inf")}, "clip must be positive and finite"),
        ({"clip": 1.0, "noise_multiplier": -1.0}, "noise_multiplier must be at least 0"),
    ],
)
def test_impossible_choices_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        rabo.Privacy(**options)


def test_noise_without_a_bound_is_refused(tmp_path):
    experiment = rabo.runs.experiment.Experiment(task="quadratic", noise_multiplier=1.0)
    with pytest.raises(ValueError, match="give clip too"):
        experiment.federation()
