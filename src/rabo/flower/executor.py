"""Runs the messages of a node in processes that are forked from one with everything in place.

Flower starts a new Python for every message, which takes longer than most messages.
"""

import json
import os
import select
import signal
import sys
from contextlib import suppress

import torch
from flwr.supercore.exit import exit_handler
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import LaunchResult
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec
from flwr.supernode.runtime.run_clientapp import run_clientapp

import rabo.flower.app  # noqa: F401 - so that a forked process finds it imported
from rabo.exchange.cost import measure
from rabo.flower import sites
from rabo.flower.lifetime import end_with

NUM_THREADS = torch.get_num_threads()


class Forked(SubprocessExecutor):
    """Forks a process for each message. What one had to build, the next ones find built."""

    def __init__(self) -> None:
        self._pipes: list[int] = []

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        reader, writer = os.pipe()
        parent = os.getpid()
        if os.fork() == 0:
            os.close(reader)
            _work(spec, writer, parent)
        os.close(writer)
        self._pipes.append(reader)
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Build here what a process that has ended was asked for."""
        ended, _, _ = select.select(self._pipes, [], [], 0)
        for pipe in ended:
            with os.fdopen(pipe) as file:
                site = file.read()
            self._pipes.remove(pipe)
            # threads for a GPU do not survive a fork, and are not started here
            if site and not torch.cuda.is_available():
                with suppress(Exception):  # it fails again, and is reported, with the next message
                    sites.recall(*json.loads(site))


def _work(spec: ExecutionSpec, writer: int, parent: int) -> None:
    """Answer one message, tell for which site, and end."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        exit_handler.registered_exit_handlers.clear()  # those are the parent's
        torch.set_num_threads(NUM_THREADS)
        end_with(parent)
        run_clientapp(spec.runtime_api_address, spec.token, spec.insecure)
    except SystemExit as done:
        status = int(done.code or 0)
        if sites.recent:
            os.write(writer, json.dumps(sites.recent).encode())
    finally:
        os._exit(status)


def main() -> None:
    address, parent, ready = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    end_with(parent)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes that end
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    measure(lambda: torch.ones(1))  # imports what torch imports late
    os.close(ready)
    run_superexec.get_executor = lambda *_, **__: Forked()  # pyright: ignore[reportPrivateImportUsage]
    run_superexec.run_superexec(address, insecure=True)


if __name__ == "__main__":
    main()
