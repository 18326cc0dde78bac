"""A SuperNode that looks for messages often and answers them at once: `rabo flower node`.

It joins when it can answer, tries for a while where it is refused, and outlives its server: when
that one has started anew and forgotten its nodes, it joins again.
"""

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
UNTIL = "RABO_JOIN_UNTIL"  # when to give up, in the environment of a process that tries again
PATIENCE = (
    90.0  # seconds; for that long a server takes a node that was killed for one that is there
)
PAUSE = 3.0  # seconds between two tries


def main() -> None:
    """Take the arguments of flower-supernode; the two of its isolation are set here."""
    arguments, port, forgotten = sys.argv[1:], str(free_port()), threading.Event()
    os.environ.update(environment())
    start_client_internal.time = SimpleNamespace(sleep=lambda s: time.sleep(min(s, POLL)))  # type: ignore[attr-defined]
    sys.argv = ["flower-supernode", *arguments, "--isolation", "process", "--port", port]
    executor = [sys.executable, "-m", "rabo.flower.executor", f"127.0.0.1:{port}"]
    child = _started([*executor, str(os.getpid())])
    threading.Thread(target=_follow, args=(child, forgotten), daemon=True).start()

    send = os.kill

    def interrupt(pid: int, number: int) -> None:
        if (pid, number) == (os.getpid(), signal.SIGINT):  # how Flower ends a node that is unknown
            forgotten.set()
        send(pid, number)

    os.kill = interrupt
    until = float(os.environ.pop(UNTIL, time.time() + PATIENCE))
    try:
        flower_supernode()  # returns when the server does not know this node any more
        forgotten.set()
    except SystemExit as end:
        is_refused = bool(end.code) and time.time() < until
        if not (forgotten.is_set() or is_refused):
            raise  # it was told to end, or must not join
    except KeyboardInterrupt:
        if not forgotten.is_set():
            raise
    # two threads of Flower may find that the node is unknown, each of which interrupts this one
    signal.signal(signal.SIGINT, lambda *_: None)
    os.environ[UNTIL] = str(time.time() + PATIENCE if forgotten.is_set() else until)
    forgotten.set()
    child.kill()
    child.wait()
    time.sleep(PAUSE)
    os.execv(sys.executable, [sys.executable, "-m", "rabo.flower.node", *arguments])


def _started(executor: list[str]) -> subprocess.Popen[bytes]:
    """Start the process that answers messages, and wait until it can; it ends with this one."""
    reader, writer = os.pipe()
    child = subprocess.Popen([*executor, str(writer)], pass_fds=[writer])
    os.close(writer)
    with os.fdopen(reader) as ready:
        ready.read()
    return child


def _follow(child: subprocess.Popen[bytes], forgotten: threading.Event) -> None:
    """End with the process that answers messages: without it, others only wait for this node."""
    child.wait()
    if not forgotten.is_set():
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
