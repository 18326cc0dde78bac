"""A SuperNode that looks for messages often and answers them at once: `rabo flower node`."""

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

from flwr.supernode import start_client_internal
from flwr.supernode.cli.flower_supernode import flower_supernode

from rabo.flower.launch import environment, free_port

POLL = 0.2  # seconds; Flower's own SuperNode waits for 3


def main() -> None:
    """Take the arguments of flower-supernode; the two of its isolation are set here."""
    port = str(free_port())
    os.environ.update(environment())
    start_client_internal.time = SimpleNamespace(sleep=lambda s: time.sleep(min(s, POLL)))  # type: ignore[attr-defined]
    sys.argv = ["flower-supernode", *sys.argv[1:], "--isolation", "process", "--port", port]
    executor = [sys.executable, "-m", "rabo.flower.executor", f"127.0.0.1:{port}"]
    child = subprocess.Popen([*executor, str(os.getpid())])  # ends when this process does
    threading.Thread(target=_follow, args=(child,), daemon=True).start()
    flower_supernode()


def _follow(child: subprocess.Popen[bytes]) -> None:
    """End with the process that answers messages: without it, others only wait for this node."""
    child.wait()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
