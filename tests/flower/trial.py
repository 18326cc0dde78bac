"""A federation of real processes on loopback, ended when a test does."""

import json
import subprocess
import time
from pathlib import Path

from rabo.flower import launch
from rabo.flower.credentials import make_certificates, make_keys
from rabo.flower.launch import Children


class Trial:
    """A SuperLink with TLS and authentication and a SuperNode per client, in a folder."""

    def __init__(self, folder: Path, clients: int = 3):
        self.folder, self.clients, self.port = folder, clients, launch.free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.app, self.log = launch.new_app(folder), folder / "log.txt"
        make_certificates(folder)
        make_keys(folder, clients)
        self.env = launch.environment(folder) | {"OMP_NUM_THREADS": "1"}
        self.children, self.nodes = Children(), []

    def __enter__(self):
        self.children.__enter__()
        try:
            launch.connect(self.folder, self.address, plain=False)
            self.server = self.start(
                launch.server_command(self.folder, "127.0.0.1", self.port, plain=False)
            )
            self.nodes = [self.join(client) for client in range(self.clients)]
            launch.wait_for_port("127.0.0.1", self.port, self.server, 60)
            launch.register(self.folder)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *details):
        self.children.__exit__(*details)

    def start(self, command):
        return self.children.start(command, self.env, self.log)

    def join(self, client, node_config=""):
        """Start a node."""
        command = launch.node_command(self.folder, client, self.address, False, node_config)
        return self.start(command)

    def begin(self, out: Path, *options, **config):
        """Submit a run, and go on."""
        config = {"out": str(out), "wait": 60.0, "device": "cpu", **config}
        text = " ".join(f"{k.replace('_', '-')}={json.dumps(v)}" for k, v in config.items())
        command = ["flwr", "run", str(self.app), launch.NAME, "--run-config", text]
        command += options
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr

    def wait_for(self, there, seconds: float):
        """Wait until something is true."""
        end = time.monotonic() + seconds
        while not there():
            assert time.monotonic() < end, f"not there in time; {self.log.read_text()[-3000:]}"
            assert self.server.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.1)

    def run(self, out: Path, *options, seconds: float = 150, **config):
        """Run to the end and return the summary."""
        self.begin(out, *options, **config)
        self.wait_for((out / "y.safetensors").exists, seconds)
        self.wait_for((out / "summary.json").exists, 10)
        time.sleep(0.2)
        return json.loads((out / "summary.json").read_text())


class Simulation(Trial):
    """A SuperLink that simulates its nodes."""

    def __enter__(self):
        self.children.__enter__()
        launch.connect(self.folder, self.address, plain=True)
        command = launch.server_command(self.folder, "127.0.0.1", self.port, plain=True)
        self.server = self.start([*command, "--simulation"])
        launch.wait_for_port("127.0.0.1", self.port, self.server, 60)
        return self
