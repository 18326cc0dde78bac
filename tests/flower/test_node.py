"""A node whose server has forgotten it, without Flower's part of it."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("flwr")

SCRIPT = """
import os, signal, subprocess, sys, time
from rabo.flower import node

def interrupted():  # by Flower itself, when the server does not know the node
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)

def forgotten_twice():
    try:
        interrupted()
    except KeyboardInterrupt:
        pass
    try:
        sys.exit(0)
    finally:  # the thread that sends heartbeats has found out too
        interrupted()

def stopped():  # by somebody at the keyboard
    raise KeyboardInterrupt

node.flower_supernode = globals()[sys.argv.pop()]
wait, nowhere = [sys.executable, "-c", "import time; time.sleep(20)"], subprocess.DEVNULL
node._started = lambda _: subprocess.Popen(wait, stdout=nowhere, stderr=nowhere)
node.PAUSE = 0.1
os.execv = lambda *_: (print("joins again", flush=True), os._exit(0))
node.main()
"""


@pytest.mark.parametrize(("how", "goes_on"), [("forgotten_twice", True), ("stopped", False)])
def test_a_node_that_is_forgotten_joins_again_and_one_that_is_stopped_ends(how, goes_on):
    command = [sys.executable, "-c", SCRIPT, how]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=60)
    assert ("joins again" in done.stdout) == goes_on, done.stderr
    assert (done.returncode == 0) == goes_on
