"""The ServerApp and the ClientApp that `flwr run` takes, from the options of a run."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from rabo.algorithms import Algorithm
from rabo.errors import lookup
from rabo.experiment import Experiment, choose_device, run
from rabo.flower.resources import ask_width
from rabo.flower.runtime import FlowerRuntime, width_records
from rabo.flower.work import WIDTH, message_types
from rabo.flower.worker import Worker
from rabo.resources import Now, at_round
from rabo.solve import Round
from rabo.tasks import TASKS, Setup

log = logging.getLogger("flwr")


def client_app(folder: Path) -> ClientApp:
    """Make the app of a node: it answers roll calls, and does what is in its table of work."""
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        kind, node = message.metadata.message_type, context.node_config
        options = tuple(sorted(context.run_config.items()))
        worker, capacity = _worker(
            folder, options, _partition(context), str(node.get("device", ""))
        )
        if kind == WIDTH:
            width = ask_width(node, capacity, worker.problem, worker.algorithm, context.state)
            content = width_records(worker.client, width)
        else:
            content = worker.answer(kind, message.content, context.state)
        return Message(content, reply_to=message)

    for kind in {WIDTH, *message_types()}:
        category, action = kind.split(".")
        getattr(app, category)(action)(answer)
    return app


def server_app(folder: Path) -> ServerApp:
    """Make the app of the server: it waits for nodes, then runs and records an experiment."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        config = context.run_config
        experiment = experiment_of(config, folder)
        out = Path(str(config["out"]) or f"runs/flower-{context.run_id}").absolute()
        _wait_for_nodes(
            grid, int(config["min-clients"]) or experiment.clients, float(config["wait"])
        )
        runtime = FlowerRuntime(
            grid,
            deadline=float(config["deadline"]),
            on_fault=_fault_log(out),
            device=torch.device(choose_device(experiment.device)),
        )
        log.info("%s · %s: %d rounds, recorded in %s", *_title(experiment), out)
        run(experiment, out, _say, runtime)

    return app


def experiment_of(config: Mapping[str, Any], folder: Path) -> Experiment:
    """Read the options of a run; a file of its own lies in the app's folder."""
    name = str(config["task"])
    options = parse_options(str(config["task-options"]), lookup("task", name, TASKS))
    if name == "own":
        options["file"] = str(folder / options["file"])
    return Experiment(
        task=name,
        task_options=options,
        algorithm=str(config["algorithm"]),
        algorithm_options=parse_options(str(config["algorithm-options"])),
        clients=int(config["clients"]),
        capacities=str(config["capacities"]) or None,
        rounds=int(config["rounds"]),
        participation=float(config["participation"]),
        seed=int(config["seed"]),
        device=str(config["device"]),
        evaluate_every=int(config["evaluate-every"]) or None,
    )


def parse_options(text: str, kind: type | None = None) -> dict[str, Any]:
    """Read "ways=5 backbone=conv4", with the types of a task's fields or as they look."""
    hints = get_type_hints(kind, include_extras=True) if kind else {}
    known = (
        {option.name: get_args(hints[option.name])[0] for option in fields(kind)} if kind else {}
    )
    options: dict[str, Any] = {}
    for item in text.split():
        name, equals, value = item.partition("=")
        name = name.replace("-", "_")
        if not equals:
            raise ValueError(f"options must look like name=value, got {item!r}")
        plain = lookup("option", name, known) if kind else None
        options[name] = value if plain is str else _plain(value)
    return options


def _plain(value: str) -> Any:
    """Return a number or a truth value where the text is one."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def _partition(context: Context) -> int:
    """Return whose data a node has."""
    node, clients = context.node_config, int(context.run_config["clients"])
    if "partition-id" not in node:
        raise ValueError("a node must say whose data it has: --node-config 'partition-id=0'")
    client = int(node["partition-id"])
    if int(node.get("num-partitions", clients)) != clients or not 0 <= client < clients:
        raise ValueError(
            f"this run has clients 0 to {clients - 1}, got partition-id={client} "
            f"num-partitions={node.get('num-partitions', clients)}"
        )
    return client


@lru_cache(maxsize=64)
def _worker(
    folder: Path, options: tuple[tuple[str, Any], ...], client: int, device: str
) -> tuple[Worker, Now]:
    """Return a client and what the run says it has; a process that lives on makes it once."""
    setup, algorithm = _built(folder, options, device)
    own = setup.clients[client]
    return Worker(client, own.problem, algorithm), at_round(own.capacity, 0)


@lru_cache(maxsize=1)
def _built(
    folder: Path, options: tuple[tuple[str, Any], ...], device: str
) -> tuple[Setup, Algorithm]:
    experiment = experiment_of(dict(options), folder)
    return replace(experiment, device=device or experiment.device).build()


def _wait_for_nodes(grid: Grid, number: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while len(list(grid.get_node_ids())) < number:
        if time.monotonic() > end:
            raise RuntimeError(f"fewer than {number} nodes have joined within {seconds:g} s")
        time.sleep(0.1)


def _fault_log(out: Path) -> Callable[[int, int, str, str], None]:
    """Write who failed, when and why to DIR/faults.jsonl."""

    def report(client: int, round: int, phase: str, why: str) -> None:
        out.mkdir(parents=True, exist_ok=True)
        with (out / "faults.jsonl").open("a") as file:
            fault = {"client": client, "round": round, "phase": phase, "why": why}
            file.write(json.dumps(fault) + "\n")
        log.warning("client %d in round %d at %s: %s", client, round, phase, why)

    return report


def _title(experiment: Experiment) -> tuple[str, str, int]:
    return experiment.task, experiment.algorithm, experiment.rounds


def _say(done: Round) -> None:
    metrics = "  ".join(f"{name} {value:.4g}" for name, value in done.metrics.items())
    log.info("round %d  clients %s  %s", done.round + 1, dict(done.present), metrics)
