"""Runs the messages of a node in processes that are forked from one with everything imported.

Flower starts a new Python for every message, which takes longer than most messages.
"""

import os
import signal
import sys

from flwr.supercore.exit import exit_handler
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import LaunchResult
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec
from flwr.supernode.runtime.run_clientapp import run_clientapp

import rabo.flower.app  # noqa: F401 - what a forked process finds imported


class Forked(SubprocessExecutor):
    """Forks a process for each message."""

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        if os.fork() == 0:
            status = 1
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                exit_handler.registered_exit_handlers.clear()  # those are the parent's
                run_clientapp(
                    spec.runtime_api_address, spec.token, spec.insecure, None, os.getppid()
                )
            except SystemExit as done:
                status = int(done.code or 0)
            finally:
                os._exit(status)
        return LaunchResult.accepted()


def main() -> None:
    address, parent = sys.argv[1], int(sys.argv[2])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes that end
    run_superexec.get_executor = lambda *_, **__: Forked()  # pyright: ignore[reportPrivateImportUsage]
    run_superexec.run_superexec(address, insecure=True, parent_pid=parent)


if __name__ == "__main__":
    main()
