"""A federation of real processes on loopback, ended when a test does."""

import json
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

from rabo.flower import launch
from rabo.flower.credentials import make_certificates, make_keys
from rabo.flower.launch import Children
from rabo.flower.membership import register


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
            self.serve()
            self.nodes = [self.join(client) for client in range(self.clients)]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *details):
        self.children.__exit__(*details)

    def start(self, command):
        return self.children.start(command, self.env, self.log)

    def serve(self):
        """Start the server, and let those join who have a key by now."""
        command = launch.server_command(self.folder, "127.0.0.1", self.port, plain=False)
        self.server = self.start(command)
        launch.wait_for_port("127.0.0.1", self.port, self.server, 60)
        register(self.folder, self.address)

    def kill_server(self):
        """Kill -9 the server and all that it has started."""
        started = psutil.Process(self.server.pid).children(recursive=True)
        self.server.kill()
        self.server.wait()
        for process in started:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(started, timeout=30)

    def join(self, client, node_config=""):
        """Start a node."""
        command = launch.node_command(self.folder, client, self.address, False, node_config)
        return self.start(command)

    def begin(self, out: Path, *options, **config):
        """Submit a run, and go on."""
        config = {"out": str(out), "wait": 120.0, "device": "cpu", **config}
        text = " ".join(f"{k.replace('_', '-')}={json.dumps(v)}" for k, v in config.items())
        command = ["flwr", "run", str(self.app), launch.NAME, "--run-config", text, *options]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr

    def wait_for(self, there, seconds: float = 240):
        """Wait until something is true."""
        end = time.monotonic() + seconds
        while not there():
            assert time.monotonic() < end, f"not there in time; {self.log.read_text()[-3000:]}"
            assert self.server.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.1)

    def finish(self, out: Path):
        """Wait until a run has ended well."""
        self.wait_for((out / "summary.json").exists)
        assert json.loads((out / "summary.json").read_text())["status"] == "finished"


class Simulation(Trial):
    """A SuperLink that simulates its nodes."""

    def __enter__(self):
        self.children.__enter__()
        launch.connect(self.folder, self.address, plain=True)
        command = launch.server_command(self.folder, "127.0.0.1", self.port, plain=True)
        self.server = self.start([*command, "--simulation"])
        launch.wait_for_port("127.0.0.1", self.port, self.server, 60)
        return self

    def begin(self, out: Path, *options, **config):
        nodes = f"num-supernodes={config.get('clients', self.clients)} client-resources-num-cpus=1"
        super().begin(out, "--federation-config", nodes, *options, **config)
