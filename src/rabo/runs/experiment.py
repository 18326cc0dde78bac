"""One run of a task: made from plain options, recorded in a folder."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import Annotated, Any

import torch

from rabo.algorithms import ALGORITHMS, Algorithm, Cosine, canonical, find_algorithm
from rabo.algorithms.steps import STEP_SIZES
from rabo.errors import lookup
from rabo.exchange.aggregation import Aggregate
from rabo.exchange.budgets import Now, Resources
from rabo.execution import RUNTIMES, Privacy, Runtime, Tolerance
from rabo.federation.clients import Client
from rabo.federation.federation import Federation, needs_single_answers, result_of
from rabo.federation.rounds import Result
from rabo.federation.solve import make_algorithm, over_all
from rabo.pruning.policies import Importance
from rabo.runs.checkpoint import Checkpoints
from rabo.runs.options import choose_device, device_name, parse_capacities
from rabo.runs.record import RunFolder, versions
from rabo.runs.writers import Start, Writer, following
from rabo.tasks import TASKS, Setup

TOLD = (
    "versions",
    "algorithm_settings",
    "headline",
    "falls",
    "elsewhere",
    "ran_on",
)  # in config.json, for readers alone


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """All choices of a run, as they are written to config.json; options of `rabo run` too."""

    task: str
    task_options: Mapping[str, Any] = field(default_factory=dict)
    algorithm: Annotated[str, ", ".join(ALGORITHMS)] = "rabo"
    algorithm_options: Mapping[str, Any] = field(default_factory=dict)
    clients: Annotated[int, "number of clients"] = 10
    capacities: Annotated[
        str | None,
        "what clients have, dealt in turn: width fractions (1,1/2,1/4) or budgets (memory:64MB, "
        "multiply-adds:2G, traffic:1MB per round); by default 1, and 1/2 in loss-tuning",
    ] = None
    rotate_capacities: Annotated[bool, "every round, clients take their neighbours' capacities"] = (
        False
    )
    rounds: Annotated[int, "number of rounds Q"] = 100
    participation: Annotated[float, "fraction of clients per round"] = 1.0
    seed: Annotated[int, "seed of data, model and draws"] = 0
    device: Annotated[str, "auto, cpu or cuda"] = "auto"
    runtime: Annotated[
        str,
        "plain (one client after the other), recorded (work is recorded and replayed), grouped "
        "(and equal clients as one), or auto (the fastest that a run allows on a GPU, else plain)",
    ] = "auto"
    evaluate_every: Annotated[int | None, "rounds between evaluations"] = None
    checkpoint_every: Annotated[
        int | None, "rounds between checkpoints; by default as often as costs 5 % of time"
    ] = None
    on_fault: Annotated[str, "what a client's failure does: raise, or drop (the round goes on)"] = (
        "raise"
    )
    min_replies: Annotated[int, "replies an exchange must have, or its round is given up"] = 1
    max_norm: Annotated[float | None, "largest norm of a reply that is used"] = None
    aggregate: Annotated[
        str, "mean, median or trimmed, per entry over the clients that hold it"
    ] = "mean"
    trim: Annotated[float, "share that is trimmed from each end"] = 0.1
    clip: Annotated[float | None, "norm to which clients shrink what they send"] = None
    noise_multiplier: Annotated[float, "deviation of the noise clients add, over --clip"] = 0.0

    def config(self) -> dict[str, Any]:
        """Return all choices as JSON has them; objects have names there."""
        try:
            return json.loads(json.dumps({f.name: getattr(self, f.name) for f in fields(self)}))
        except TypeError as error:
            raise ValueError(f"an experiment must be made of plain options: {error}") from error

    def identity(self) -> dict[str, Any]:
        """Return what a checkpoint must agree with: not the number of rounds, nor the device."""
        free = ("rounds", "checkpoint_every", "device")
        return {name: value for name, value in self.config().items() if name not in free}

    def federation(self, runtime: Runtime | None = None) -> tuple[Federation, Setup]:
        """Build data, clients and algorithm.

        With a runtime given, the clients are elsewhere: they protect what they send themselves.
        """
        setup, algorithm = self.build()
        clients = setup.clients
        if runtime is not None:
            template = setup.template() if setup.template else clients[0].problem
            clients = [Client(template)] * self.clients
        federation = Federation(
            clients,
            algorithm,
            participation=self.participation,
            evaluate=(setup.evaluate_here if runtime is None else None) or setup.evaluate,
            evaluate_every=self.evaluate_every or setup.evaluate_every,
            runtime=runtime or self._runtime(setup),
            compare=runtime is None,
            tolerance=self._tolerance(),
            aggregate=self._aggregate(),
            privacy=self.privacy() if runtime is None else None,
        )
        return federation, setup

    def build(self) -> tuple[Setup, Algorithm]:
        """Build what the server and every client must agree on."""
        if self.clients < 1:
            raise ValueError(f"clients must be at least 1, got {self.clients}")
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {self.rounds}")
        if self.checkpoint_every is not None and self.checkpoint_every < 1:
            raise ValueError(f"checkpoint_every must be at least 1, got {self.checkpoint_every}")
        if self.evaluate_every is not None and self.evaluate_every < 1:
            raise ValueError(f"evaluate_every must be at least 1, got {self.evaluate_every}")
        if self.capacities is not None and not self.capacities.strip():
            raise ValueError("capacities must name at least one, such as 1,1/2,1/4, got none")
        task = lookup("task", self.task, TASKS)(**self.task_options)
        kinds = parse_capacities(self.capacities or getattr(task, "capacities", "1"))
        capacities = [self._resources(kinds, i) for i in range(self.clients)]
        device = choose_device(self.device)
        if device.startswith("cuda:"):
            torch.cuda.set_device(device)  # streams and recordings are those of the current one
        setup = task.build(capacities, self.rounds, self.seed, device)
        kind = find_algorithm(self.algorithm)
        known = {option.name for option in fields(kind)}
        advice = dict(setup.options)
        if getattr(kind, "own_policy", None) or not isinstance(kind().policy, Importance):
            advice.pop("policy", None)  # it is published with other masks, or none
        advice |= setup.own_options.get(canonical(self.algorithm), {})
        if self.algorithm_options.get("num_outer_steps", 1) != 1:
            advice.pop("outer_step", None)  # steps on the client are plain
        if "beta" in self.algorithm_options or self.algorithm_options.get("levels") == "y":
            advice.pop("beta_x", None)  # it goes with the beta that is suggested, for both levels
        options = {name: value for name, value in advice.items() if name in known}
        options |= {**self.algorithm_options, "seed": self.seed}
        algorithm = make_algorithm(self.algorithm, **over_all(self.rounds, options))
        if setup.judged_by is not None and hasattr(algorithm, "predict"):
            setup = setup.judged_by(algorithm.predict)  # type: ignore[attr-defined]
        return setup, algorithm

    def _resources(self, kinds: Sequence[Now], client: int) -> Resources:
        """Return what a client has: the same in all rounds, or the next kind in the next round."""
        if self.rotate_capacities:
            return lambda round: kinds[(client + round) % len(kinds)]
        return kinds[client % len(kinds)]

    def _tolerance(self) -> Tolerance:
        return Tolerance(
            on_fault=self.on_fault,  # type: ignore[arg-type]
            min_replies=self.min_replies,
            max_norm=inf if self.max_norm is None else self.max_norm,
        )

    def _aggregate(self) -> Aggregate:
        return Aggregate(self.aggregate, self.trim)  # type: ignore[arg-type]

    def privacy(self) -> Privacy | None:
        if self.clip is not None:
            return Privacy(clip=self.clip, noise_multiplier=self.noise_multiplier)
        if self.noise_multiplier:
            raise ValueError("noise_multiplier is a multiple of clip: give clip too")
        return None

    def _runtime(self, setup: Setup) -> Runtime:
        why = needs_single_answers(
            self.participation, self._tolerance(), self._aggregate(), self.privacy()
        )
        on_gpu = choose_device(self.device).startswith("cuda")
        fastest = ("recorded" if why else "grouped") if on_gpu else "plain"
        problems = {i: client.problem for i, client in enumerate(setup.clients)}
        known = {**RUNTIMES, "auto": RUNTIMES[fastest]}
        return lookup("runtime", self.runtime, known)(problems)


def run(
    experiment: Experiment,
    out: Path,
    writers: Sequence[Writer] = (),
    runtime: Runtime | None = None,
) -> Result:
    """Run an experiment and record it; what was reached survives Ctrl-C, failures and kill -9."""
    federation, setup = experiment.federation(runtime)
    config = _with_settings(experiment, federation, setup, [device_name(experiment.device)])
    with RunFolder(out, config) as folder:
        return _drive(experiment, federation, setup, folder, writers)


def _with_settings(
    experiment: Experiment, federation: Federation, setup: Setup, ran_on: Sequence[str]
) -> dict[str, Any]:
    """Return the options, and for a reader the algorithm with what the task suggests."""
    told = {"headline": setup.headline, "falls": setup.falls, "elsewhere": not federation.compare}
    told["ran_on"] = list(ran_on)
    return {**experiment.config(), "algorithm_settings": repr(federation.algorithm), **told}


def resume(
    experiment: Experiment,
    out: Path,
    writers: Sequence[Writer] = (),
    say: Callable[[str], None] = lambda _: None,
    runtime: Runtime | None = None,
) -> Result:
    """Go on with a recorded run from its last checkpoint, to the same bits as without a stop."""
    recorded = json.loads((out / "config.json").read_text())
    begun_with, before = recorded["versions"], recorded.get("rounds")
    if begun_with != versions():
        say(f"begun with {begun_with}, goes on with {versions()}: bits may differ")
    here = device_name(experiment.device)
    ran_on = recorded.get("ran_on", [here])
    if ran_on[-1] != here:
        if "memory:" in (experiment.capacities or ""):
            raise ValueError(
                f"the run in {out} has clients with budgets of memory, whose widths were measured "
                f"on {ran_on[-1]}; go on there, got a device that is {here}"
            )
        say(f"begun on {ran_on[-1]}, goes on on {here}: bits may differ")
        ran_on = [*ran_on, here]
    federation, setup = experiment.federation(runtime)
    found = Checkpoints(out, experiment.identity()).latest(federation.state, say)
    if found is None:
        say(f"{out} has no checkpoint yet: it starts from the beginning")
    else:
        federation.restore(found)
        if found.state.round > experiment.rounds:
            raise ValueError(
                f"the run in {out} has done {found.state.round} rounds, got "
                f"rounds={experiment.rounds}: give a larger number, or another folder"
            )
        say(f"goes on after {found.state.round} rounds")
        falling = [n for n in STEP_SIZES if isinstance(getattr(federation.algorithm, n, 0), Cosine)]
        if before != experiment.rounds and falling:
            say(
                f"with {experiment.rounds} rounds in place of {before}, {' and '.join(falling)} "
                "will fall over more rounds: steps are larger from here"
            )
    config = _with_settings(experiment, federation, setup, ran_on)
    with RunFolder(out, config, federation.state.round) as folder:
        return _drive(experiment, federation, setup, folder, writers)


def recorded_experiment(
    out: Path, rounds: int | None = None, device: str | None = None
) -> Experiment:
    """Read what a folder's run was asked for; `rounds` may be raised, `device` be another."""
    if not out.is_dir():
        raise ValueError(f"there is no folder {out}; give the one that the run named when it began")
    try:
        config = json.loads((out / "config.json").read_text())
        if config.get("elsewhere"):
            raise ValueError(
                "its clients are in other processes; start the server and the nodes, and run it "
                f"again with `rabo flower run FOLDER --out {out} --resume`"
            )
        for told in TOLD:
            config.pop(told, None)
        experiment = Experiment(**config)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{out} holds no run that can be resumed ({error}); give the folder that the run named "
            "when it began or ended"
        ) from error
    summary = out / "summary.json"
    is_finished = summary.exists() and json.loads(summary.read_text())["status"] == "finished"
    if is_finished and (rounds is None or rounds <= experiment.rounds):
        raise ValueError(
            f"the run in {out} is finished after {experiment.rounds} rounds; to do more, give "
            "--rounds with a larger number"
        )
    if rounds is not None and rounds < experiment.rounds:
        raise ValueError(
            f"the run in {out} is to do {experiment.rounds} rounds, got --rounds {rounds}: leave "
            "--rounds out to do those, or give a larger number to do more"
        )
    return replace(
        experiment, rounds=rounds or experiment.rounds, device=device or experiment.device
    )


def _drive(
    experiment: Experiment,
    federation: Federation,
    setup: Setup,
    folder: RunFolder,
    writers: Sequence[Writer],
) -> Result:
    """Do the rounds that are missing; a checkpoint of the last one is left in any case."""
    checkpoints = Checkpoints(
        folder.path, experiment.identity(), experiment.checkpoint_every, folder.secure
    )
    known = folder.config, setup.headline, setup.falls, experiment.rounds
    start = Start(folder.path, *known, tuple(folder.history), federation.evaluate_every)
    status = "failed"
    with following(writers, start) as tell:
        try:
            remaining = experiment.rounds - federation.state.round
            for done in federation.run(remaining) if remaining else ():
                folder.add(done)
                checkpoints.add(federation.snapshot())
                tell(done)
            if setup.finish:
                setup.finish(federation.state, federation.ledger, folder.path)
            about = {"task": experiment.task, "algorithm": experiment.algorithm, **versions()}
            levels = setup.export and setup.export(federation.state, federation.ledger)
            result_of(federation, folder.history).export(folder.path, levels, about)
            status = "finished"
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        finally:
            checkpoints.flush()
            result = result_of(federation, folder.history)
            folder.close_with(result, setup.headline, status)
    return result
