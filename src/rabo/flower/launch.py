"""A federation for a trial: a SuperLink, SuperNodes and runs, as processes of this machine."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from rabo.flower.credentials import CA, CERTIFICATE, KEY, KEYS, has_certificates, is_loopback

TEMPLATE = Path(__file__).parent / "template"
APP = "app"
HOME = ".flower"  # what Flower's command line keeps, in the folder of the trial
NAME = "trial"  # of the connection to the server, in Flower's words
LOGS = "logs"  # of Flower's processes, in the folder of the trial
SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # what is installed is used as it is
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
}


def environment(folder: Path | None = None) -> dict[str, str]:
    """Return the environment of Flower's processes; what is set already stays."""
    own = {"FLWR_HOME": str((folder / HOME).absolute())} if folder else {}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**SETTINGS, **own, **os.environ, "PATH": path}


def new_app(folder: Path) -> Path:
    """Write DIR/app, which `flwr run` takes as it is. Keys lie beside it: an app is sent out."""
    if (folder / APP).exists():
        raise ValueError(f"{folder} already holds an app; choose another folder")
    shutil.copytree(TEMPLATE, folder / APP, ignore=shutil.ignore_patterns("__pycache__"))
    return folder / APP


def check_server(folder: Path, host: str) -> None:
    """Refuse to serve without certificates: plain text must be asked for."""
    if not has_certificates(folder):
        named = "" if is_loopback(host) else f"`rabo flower certificates {folder} --host NAME` and "
        raise ValueError(
            f"{folder} has no certificates: run {named}`rabo flower keys {folder}`, "
            "or give --insecure"
        )


def check_node(folder: Path, client: int) -> None:
    """Refuse to join without the authority of the server and a key of one's own."""
    ca, key = folder / CA, key_of(folder, client)
    if not ca.exists():
        raise ValueError(f"{ca} is missing: copy it from the server, or give --insecure")
    if not key.exists():
        raise ValueError(
            f"{key} is missing: make it on the server with `rabo flower keys {folder} "
            f"--clients {client + 1}`, start the server again, and copy the key here"
        )


def check_app(folder: Path) -> None:
    if not (folder / APP).is_dir():
        raise ValueError(f"{folder} has no app: run `rabo flower new {folder}`")


def check_connection(folder: Path) -> None:
    """Refuse to run where Flower's command line was not told of a server."""
    if not (Path(environment(folder)["FLWR_HOME"]) / "config.toml").exists():
        raise ValueError(f"{folder} has had no server: start it with `rabo flower server {folder}`")


def server_command(folder: Path, host: str, port: int, plain: bool) -> list[str]:
    """Return the SuperLink, with TLS and node authentication unless it is plain."""
    command = ["flower-superlink", "--host", host, "--port", str(port)]
    if plain:
        return [*command, "--insecure"]
    files = {"--ssl-ca-certfile": CA, "--ssl-certfile": CERTIFICATE, "--ssl-keyfile": KEY}
    for option, name in files.items():
        command += [option, str(folder / name)]
    return [*command, "--enable-supernode-auth"]


def node_command(
    folder: Path, client: int, address: str, plain: bool, node_config: str = ""
) -> list[str]:
    """Return the SuperNode of one client."""
    command = [sys.executable, "-m", "rabo.flower.node", "--superlink", address]
    command += ["--node-config", f"partition-id={client} {node_config}".strip()]
    if plain:
        return [*command, "--insecure"]
    command += ["--root-certificates", str(folder / CA)]
    return [*command, "--auth-supernode-private-key", str(key_of(folder, client))]


def key_of(folder: Path, client: int) -> Path:
    return folder / KEYS / f"client-{client}"


def connect(folder: Path, address: str, plain: bool) -> None:
    """Tell Flower's command line where the server is."""
    how = "insecure = true" if plain else f'root-certificates = "{(folder / CA).absolute()}"'
    text = f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\naddress = "{address}"\n{how}\n'
    (folder / HOME).mkdir(parents=True, exist_ok=True)
    (folder / HOME / "config.toml").write_text(text)


def run_command(folder: Path, config: Path) -> list[str]:
    """Return the command that submits a run and streams its log."""
    return ["flwr", "run", str(folder / APP), NAME, "--stream", "--run-config", str(config)]


def log_of(folder: Path, name: str) -> Path:
    """Return the log of a process: DIR/logs/NAME.log."""
    return folder / LOGS / f"{name}.log"


def stream(command: Sequence[str], env: Mapping[str, str]) -> Generator[str, None, None]:
    """Run a command and yield what it prints, line by line; it ends when nobody listens."""
    env = {**env, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield from process.stdout or ()
        finally:
            process.terminate()


class Children:
    """Processes that end when this one does."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(
        self, command: Sequence[str], env: Mapping[str, str], log: Path | None = None
    ) -> subprocess.Popen[bytes]:
        if log:
            log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") if log else nullcontext() as output:
            process = subprocess.Popen(command, env=env, stdout=output, stderr=output)
        self.processes.append(process)
        return process

    def wait(self, say: Callable[[int, int], None] = lambda i, code: None) -> int:
        """Wait until all of them have ended, and say which and how; return the worst code."""
        running = dict(enumerate(self.processes))
        while running:
            time.sleep(0.2)
            for i in [i for i, process in running.items() if process.poll() is not None]:
                say(i, running.pop(i).returncode)
        return max((abs(process.returncode) for process in self.processes), default=0)

    def __enter__(self) -> "Children":
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self.processes):
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for_port(host: str, port: int, process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait until a server answers."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        try:
            socket.create_connection((host, port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"the server did not start on {host}:{port}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
