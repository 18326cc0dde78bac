"""The ServerApp and the ClientApp that `flwr run` takes, from the options of a run."""

import logging
import os
import secrets
import time
from dataclasses import replace
from pathlib import Path

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from rabo.exchange.budgets import at_round
from rabo.execution import Privacy
from rabo.flower import sites
from rabo.flower.events import Events, failures_told, tell, tell_result
from rabo.flower.lifetime import end_with
from rabo.flower.messages import WIDTH, WORK, fault_records
from rabo.flower.options import experiment_of
from rabo.flower.resources import ask_width
from rabo.flower.runtime import FlowerRuntime, width_records
from rabo.runs.experiment import resume, run
from rabo.runs.options import choose_device

log = logging.getLogger("flwr")


def client_app(folder: Path) -> ClientApp:
    """Make the app of a node: it answers roll calls, and does what is in its table of work."""
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        kind, node = message.metadata.message_type, context.node_config
        options = sorted(context.run_config.items())
        device = str(node.get("device", ""))
        try:
            worker, capacity = sites.recall(str(folder), options, _partition(context), device)
            if kind == WIDTH:
                asked = at_round(capacity, int(message.content.config_records["request"]["round"]))  # type: ignore[arg-type]
                width = ask_width(node, asked, worker.problem, worker.algorithm, context.state)
                content = width_records(worker.client, width)
            else:
                privacy = _privacy(context, folder)
                compare = bool(context.run_config.get("compare", True))
                content = worker.answer(message.content, context.state, privacy, compare)
        except Exception as error:
            log.exception("client failed at %s", kind)
            content = fault_records(error)
        return Message(content, reply_to=message)

    app.query(WIDTH.removeprefix("query."))(answer)
    app.train(WORK.removeprefix("train."))(answer)
    return app


def server_app(folder: Path) -> ServerApp:
    """Make the app of the server: it waits for nodes, then runs and records an experiment."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        end_with(os.getppid())  # or it would wait for its SuperLink for ever
        with failures_told():
            _serve(grid, context)

    def _serve(grid: Grid, context: Context) -> None:
        config = context.run_config
        experiment = experiment_of(config, folder)
        out = Path(str(config["out"]) or f"runs/flower-{context.run_id}").absolute()
        _wait_for_nodes(
            grid, int(config["min-clients"]) or experiment.clients, float(config["wait"])
        )
        runtime = FlowerRuntime(
            grid,
            deadline=float(config["deadline"]),
            least=experiment.min_replies,
            wait=float(config["wait"]),
            device=torch.device(choose_device(experiment.device)),
        )
        if config["resume"] and (out / "config.json").exists():
            result = resume(experiment, out, [Events()], say, runtime)
        else:
            result = run(experiment, out, [Events()], runtime)
        tell_result(result, out)

    return app


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


def _wait_for_nodes(grid: Grid, number: int, seconds: float) -> None:
    """Wait until enough nodes have joined, and tell how many have."""
    end, joined = time.monotonic() + seconds, -1
    while joined < number:
        found = len(list(grid.get_node_ids()))
        if found != joined:
            say(f"{found} of {number} nodes have joined")
            joined = found
        elif time.monotonic() > end:
            raise RuntimeError(
                f"fewer than {number} nodes have joined within {seconds:g} s, got {joined}"
            )
        else:
            time.sleep(0.1)


def say(text: str) -> None:
    """Show a line in the terminal of the run."""
    tell("say", text=text)


def _privacy(context: Context, folder: Path) -> Privacy | None:
    """Return what a client does to its answers; by default nobody else can know the noise."""
    privacy = experiment_of(context.run_config, folder).privacy()
    if privacy is None or context.run_config["repeatable-noise"]:
        return privacy
    return replace(privacy, seed=secrets.randbits(63))
