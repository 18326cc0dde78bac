"""One run of a task: made from plain options, recorded in a folder."""

import csv
import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, TextIO

import torch

from rabo.algorithms import ALGORITHMS, Algorithm
from rabo.errors import lookup
from rabo.export import save_tensors
from rabo.metering import Cost
from rabo.resources import Budget, Now, check_capacity
from rabo.runtimes import RUNTIMES, Runtime
from rabo.solve import Client, Federation, Result, Round, make_algorithm, result_of
from rabo.tasks import TASKS, Setup


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """All choices of a run, as they are written to config.json."""

    task: str
    task_options: Mapping[str, Any] = field(default_factory=dict)
    algorithm: str = "rabo"
    algorithm_options: Mapping[str, Any] = field(default_factory=dict)
    clients: int = 10
    capacities: str | None = None  # None: what the task suggests
    rounds: int = 100
    participation: float = 1.0
    seed: int = 0
    device: str = "auto"
    runtime: str = "auto"  # plain, recorded, or what suits the device
    evaluate_every: int | None = None

    def federation(self, runtime: Runtime | None = None) -> tuple[Federation, Setup]:
        """Build data, clients and algorithm; with a runtime given, the clients are elsewhere."""
        setup, algorithm = self.build()
        clients = setup.clients
        if runtime is not None:
            template = setup.template() if setup.template else clients[0].problem
            clients = [Client(template)] * self.clients
        federation = Federation(
            clients,
            algorithm,
            participation=self.participation,
            evaluate=setup.evaluate,
            evaluate_every=self.evaluate_every or setup.evaluate_every,
            runtime=runtime or self._runtime(setup),
            compare=runtime is None,
        )
        return federation, setup

    def build(self) -> tuple[Setup, Algorithm]:
        """Build what the server and every client must agree on."""
        if self.clients < 1:
            raise ValueError(f"clients must be at least 1, got {self.clients}")
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {self.rounds}")
        task = lookup("task", self.task, TASKS)(**self.task_options)
        kinds = parse_capacities(self.capacities or getattr(task, "capacities", "1"))
        capacities = [kinds[i % len(kinds)] for i in range(self.clients)]
        setup = task.build(capacities, self.rounds, self.seed, choose_device(self.device))
        kind = lookup("algorithm", self.algorithm, ALGORITHMS)
        known = {option.name for option in fields(kind)}
        advice = {**setup.options, **setup.own_options.get(self.algorithm, {})}
        options = {name: value for name, value in advice.items() if name in known}
        options |= {**self.algorithm_options, "seed": self.seed}
        return setup, make_algorithm(self.algorithm, **options)

    def _runtime(self, setup: Setup) -> Runtime:
        on_gpu = choose_device(self.device).startswith("cuda")
        name = ("recorded" if on_gpu else "plain") if self.runtime == "auto" else self.runtime
        problems = {i: client.problem for i, client in enumerate(setup.clients)}
        return lookup("runtime", name, RUNTIMES)(problems)


def run(
    experiment: Experiment,
    out: Path,
    on_round: Callable[[Round], None] = lambda _: None,
    runtime: Runtime | None = None,
) -> Result:
    """Run an experiment and record it; what was reached survives Ctrl-C and failures."""
    federation, setup = experiment.federation(runtime)
    history: list[Round] = []
    with RunFolder(out, experiment) as folder:
        status = "failed"
        try:
            for done in federation.run(experiment.rounds):
                history.append(done)
                folder.add(done)
                on_round(done)
            if setup.finish:
                setup.finish(federation.state, federation.ledger, out)
            export(federation, setup, experiment, out)
            status = "finished"
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        finally:
            result = result_of(federation, history)
            folder.close_with(result, setup.headline, status)
    return result


def export(federation: Federation, setup: Setup, experiment: Experiment, out: Path) -> None:
    """Write what was trained as DIR/x.safetensors and DIR/y.safetensors."""
    state, ledger = federation.state, federation.ledger
    if setup.export:
        levels = setup.export(state, ledger)
    else:
        levels = {name: ledger.ever_trained(name, getattr(state, name)) for name in ("x", "y")}
    about = {"task": experiment.task, "algorithm": experiment.algorithm, **versions()}
    for name, tensors in levels.items():
        save_tensors(out / f"{name}.safetensors", tensors, about)


class RunFolder:
    """DIR/config.json, DIR/metrics.jsonl, DIR/costs.csv and DIR/summary.json."""

    def __init__(self, path: Path, experiment: Experiment):
        self.path, self.experiment = path, experiment
        if (path / "config.json").exists():
            raise ValueError(f"{path} already holds a run; choose another --out or remove it")

    def __enter__(self) -> "RunFolder":
        self.path.mkdir(parents=True, exist_ok=True)
        config = {**asdict(self.experiment), "versions": versions()}
        (self.path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        self._metrics: TextIO = (self.path / "metrics.jsonl").open("w")
        self._costs: TextIO = (self.path / "costs.csv").open("w", newline="")
        self._rows = csv.writer(self._costs)
        self._rows.writerow(["round", "client", "phase", *Cost._fields])
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.close()
        self._costs.close()

    def add(self, done: Round) -> None:
        """Write a round at once, so that nothing is lost if the next one fails."""
        self._metrics.write(json.dumps(done.as_dict()) + "\n")
        self._metrics.flush()
        for entry in done.entries:
            self._rows.writerow([entry.round, entry.client, entry.phase, *entry.cost])
        self._costs.flush()

    def close_with(self, result: Result, headline: str, status: str) -> None:
        experiment = self.experiment
        summary = {
            "task": experiment.task,
            "algorithm": experiment.algorithm,
            "seed": experiment.seed,
            "status": status,
            "rounds": len(result.history),
            "headline": headline,
            "metrics": result.metrics,
            "cost": result.cost._asdict(),
            "full_model_cost": result.full_cost._asdict(),
            "relative_cost": result.relative_cost,
            "cost_by_phase": {k: v._asdict() for k, v in result.ledger.by_phase.items()},
            "coverage": dict(result.coverage),
            "versions": versions(),
        }
        (self.path / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


def versions() -> dict[str, str]:
    from rabo import __version__

    return {"rabo": __version__, "torch": torch.__version__, "python": platform.python_version()}


def choose_device(name: str) -> str:
    """Resolve "auto" to the GPU if there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"no GPU is available here, got --device {name}; use cpu or auto")
    return name


def parse_capacities(text: str) -> list[Now]:
    """Read "1,1/2,0.25" and budgets such as "memory:64MB" or "multiply-adds:2G"."""
    return [_parse_capacity(item.strip()) for item in text.split(",")]


def _parse_capacity(item: str) -> Now:
    kind, colon, amount = item.partition(":")
    if colon:
        names = {"memory": "memory", "multiply-adds": "multiply_adds", "traffic": "traffic"}
        return Budget(**{lookup("budget", kind, names): amount})
    try:
        return check_capacity(float(Fraction(item)))
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(
            f"a capacity must be a fraction of the width in (0, 1] such as 1/2, or a budget "
            f"such as memory:64MB, got {item!r}"
        ) from error
