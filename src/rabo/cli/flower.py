"""`rabo flower ...`: from nothing to a federation; parse, call, print."""

import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from rabo.cli.options import AlgorithmOptions, command_of, with_task
from rabo.errors import lookup
from rabo.flower import launch
from rabo.flower.credentials import has_certificates, make_certificates, make_keys
from rabo.flower.follow import Follower
from rabo.flower.launch import Children
from rabo.flower.options import FlowerOptions, app_config, run_config, write_config
from rabo.runs.experiment import Experiment
from rabo.runs.terminal import console, errors
from rabo.tasks import TASKS

app = typer.Typer(
    help="Run a federation on real machines, with Flower.",
    epilog="Example: rabo flower up trial",
    no_args_is_help=True,
)

Folder = Annotated[Path, typer.Argument(help="folder of the trial")]
Host = Annotated[str, typer.Option(help="address of the server")]
Port = Annotated[int, typer.Option(help="port of the server")]
Insecure = Annotated[bool, typer.Option("--insecure", help="without TLS and authentication")]
Words = Annotated[
    list[str] | None,
    typer.Argument(help="a task (the app's, or FILE.py in it), then options: see DIR TASK --help"),
]
OWN_WORDS = {"allow_interspersed_args": False}  # options behind the folder depend on the task
NodeConfig = Annotated[
    str,
    typer.Option(help="what the node has: 'capacity=0.5', 'memory=\"512MB\"', 'capacity=\"auto\"'"),
]
PORT = 8443


@app.command(epilog="Example: rabo flower new trial")
def new(folder: Folder) -> None:
    """Write an app that `flwr run` takes as it is, with a problem of your own to edit."""
    written = _guarded(lambda: launch.new_app(folder))
    typer.echo(f"{written}/pyproject.toml has the options of the run")


@app.command(epilog="Example: rabo flower certificates trial --host lab.example.org")
def certificates(
    folder: Folder,
    host: Annotated[list[str] | None, typer.Option(help="more names of the server")] = None,
) -> None:
    """Make an authority and the certificate of the server, for a trial."""
    make_certificates(folder, host or [])
    typer.echo(f"{folder}/ca.pem goes to every node; {folder}/server.key stays here")


@app.command(epilog="Example: rabo flower keys trial --clients 3")
def keys(
    folder: Folder, clients: Annotated[int, typer.Option(help="number of clients", min=1)] = 3
) -> None:
    """Make a key for every client, and certificates if there are none; keep what is there."""
    paths = _guarded(lambda: _make_missing(folder, clients))
    typer.echo(f"{paths[0].parent}/client-I goes to the machine of client I, and nowhere else")


@app.command(epilog="Example: rabo flower server trial")
def server(
    folder: Folder, host: Host = "127.0.0.1", port: Port = PORT, insecure: Insecure = False
) -> None:
    """Start the server and let the nodes join whose keys are in the folder."""
    with _children() as children:
        _guarded(lambda: _serve(children, folder, host, port, insecure))
        _guarded(children.wait)


@app.command(epilog="Example: rabo flower node trial --client 0 --host lab.example.org")
def node(
    folder: Folder,
    client: Annotated[int, typer.Option(help="whose data this machine has")],
    host: Host = "127.0.0.1",
    port: Port = PORT,
    node_config: NodeConfig = "",
    insecure: Insecure = False,
) -> None:
    """Join as one client."""
    log = launch.log_of(folder, f"client-{client}")
    with _children() as children:
        _guarded(lambda: _join(children, folder, [client], f"{host}:{port}", node_config, insecure))
        code = _guarded(children.wait)
        if code:
            typer.echo(f"the node ended (code {code}); its log is {log}", err=True)
        raise typer.Exit(code)


@app.command(epilog="Example: rabo flower nodes trial --clients 3")
def nodes(
    folder: Folder,
    clients: Annotated[int, typer.Option(help="number of clients", min=1)] = 3,
    host: Host = "127.0.0.1",
    port: Port = PORT,
    node_config: NodeConfig = "",
    insecure: Insecure = False,
) -> None:
    """Join as all clients at once: a trial on one machine."""
    address = f"{host}:{port}"
    with _children() as children:
        _guarded(lambda: _join(children, folder, range(clients), address, node_config, insecure))

        def say(client: int, code: int) -> None:
            typer.echo(
                f"the node of client {client} ended (code {code}), the others go on; its log is "
                f"{launch.log_of(folder, f'client-{client}')}; to start it again: "
                f"rabo flower node {folder} --client {client}",
                err=True,
            )

        raise typer.Exit(_guarded(lambda: children.wait(say)))


@app.command(
    context_settings=OWN_WORDS,
    epilog="Example: rabo flower run trial digits --rounds 5 --alpha 0.3",
)
def run(folder: Folder, words: Words = None) -> None:
    """Run the app on the federation, with the options of `rabo run` and of the federation."""
    asked = _asked("run", folder, words or [], _Quiet)
    _guarded(lambda: launch.check_connection(folder))
    try:
        _run(asked)
    except KeyboardInterrupt:
        typer.echo("the run goes on at the server; Ctrl-C there ends it", err=True)
        raise typer.Exit(130) from None


@app.command(
    context_settings=OWN_WORDS,
    epilog="Example: rabo flower up trial digits --clients 3 --alpha 0.3",
)
def up(folder: Folder, words: Words = None) -> None:
    """Start a server and nodes on this machine, run the app once, and end them all.

    It has the options of `rabo flower run`. Certificates and keys that are missing are made.
    """
    asked = _asked("up", folder, words or [], _Up)
    plain, clients = asked.insecure, asked.clients
    if not plain:
        _guarded(lambda: _make_missing(folder, clients))
    port, follower = launch.free_port(), asked.follower()
    try:
        with _children() as children:
            _guarded(lambda: _serve(children, folder, "127.0.0.1", port, plain))
            address = f"127.0.0.1:{port}"
            _guarded(lambda: _join(children, folder, range(clients), address, "", plain))
            _run(asked, follower)
    except KeyboardInterrupt:
        typer.echo(_how_to_go_on(asked, follower.folder), err=True)
        raise typer.Exit(130) from None


@dataclass(frozen=True, kw_only=True)
class _Quiet:
    quiet: Annotated[bool, "print the result alone"] = False


@dataclass(frozen=True, kw_only=True)
class _Up(_Quiet):
    insecure: Annotated[bool, "without TLS and authentication"] = False


@dataclass(frozen=True)
class _Asked:
    """A run as the command line asks for it."""

    folder: Path
    words: Sequence[str]
    config: Mapping[str, Any]
    clients: int
    quiet: bool
    insecure: bool

    def follower(self) -> Follower:
        return Follower(console, errors, self.quiet)


def _asked(command: str, folder: Path, words: Sequence[str], kind: type) -> _Asked:
    """Read the task and the options behind the folder."""
    _guarded(lambda: launch.check_app(folder))
    plain, rest = app_config(folder), with_task(words)
    named = bool(rest) and not rest[0].startswith("-")
    task = rest.pop(0) if named else plain["task"]
    _guarded(lambda: lookup("task", task, TASKS))
    found: list[dict[str, Any]] = []
    kinds = (Experiment, FlowerOptions, AlgorithmOptions, TASKS[task], kind)
    reader = command_of(
        lambda *each: found.extend(each), *kinds, about=TASKS[task], without="runtime", unset=True
    )
    small = typer.Typer(add_completion=False)
    small.command(epilog=f"Example: rabo flower {command} {folder} {task} --rounds 5")(reader)
    name = f"rabo flower {command} {folder} {task}"
    with typer.main.get_command(small).make_context(name, list(rest)) as context:
        context.command.invoke(context)
    of_run, of_flower, algorithm, own, shown = (
        {name: value for name, value in each.items() if value is not None} for each in found
    )
    options = AlgorithmOptions(**algorithm).given()
    config = _guarded(lambda: run_config(folder, task, {**of_run, **of_flower}, own, options))
    clients = {**plain, **config}["clients"]
    quiet, insecure = (bool(shown.get(name)) for name in ("quiet", "insecure"))
    return _Asked(folder, [task, *rest], config, clients, quiet, insecure)


def _run(asked: _Asked, follower: Follower | None = None) -> None:
    """Show a run until it ends."""
    follower, folder = follower or asked.follower(), asked.folder
    command = launch.run_command(folder, write_config(folder, asked.config))
    log = launch.log_of(folder, "run")
    with closing(launch.stream(command, launch.environment(folder))) as lines:
        follower.follow(lines, log)
    if not follower.is_finished:
        why = follower.error or (
            f"the run was not finished; start a server with `rabo flower server {folder}` if none "
            "answers"
        )
        typer.echo(f"error: {why}\nlogs: {log}, {launch.log_of(folder, 'server')}", err=True)
        raise typer.Exit(1)


def _how_to_go_on(asked: _Asked, out: str) -> str:
    if not out:
        return "stopped before the run began"
    words = ["rabo", "flower", "up", str(asked.folder), *asked.words, "--out", out, "--resume"]
    return f"stopped; the rounds so far are in {out}; to go on:\n  {shlex.join(words)}"


def _make_missing(folder: Path, clients: int) -> list[Path]:
    if not has_certificates(folder):
        make_certificates(folder)
    return make_keys(folder, clients)


def _serve(children: Children, folder: Path, host: str, port: int, plain: bool) -> None:
    from rabo.flower.membership import register  # imports Flower, which takes a second

    if not plain:
        launch.check_server(folder, host)
    here = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    launch.connect(folder, f"{here}:{port}", plain)
    command = launch.server_command(folder, host, port, plain)
    log = launch.log_of(folder, "server")
    process = children.start(command, launch.environment(folder), log)
    try:
        launch.wait_for_port(here, port, process, 60)
    except RuntimeError as error:
        raise RuntimeError(f"{error}; its log: {log}") from None
    known = 0 if plain else register(folder, f"{here}:{port}")
    joined = "any node" if plain else f"{known} nodes with keys"
    how = "PLAIN, nothing is encrypted" if plain else "TLS"
    typer.echo(f"server on {host}:{port} ({how}); may join: {joined}; log: {log}")


def _join(
    children: Children,
    folder: Path,
    clients: Sequence[int],
    address: str,
    config: str,
    plain: bool,
) -> None:
    for client in clients:
        if not plain:
            launch.check_node(folder, client)
        command = launch.node_command(folder, client, address, plain, config)
        log = launch.log_of(folder, f"client-{client}")
        children.start(command, launch.environment(folder), log)
    who = f"client {clients[0]}" if len(clients) == 1 else f"clients 0 to {clients[-1]}"
    typer.echo(f"{who}: joining {address} ({'PLAIN' if plain else 'TLS'}); Ctrl-C ends it")


def _children() -> Children:
    """Let processes end with this one, on Ctrl-C and when it is told to end."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    return Children()


def _guarded(work: Callable[[], Any]) -> Any:
    """Turn what a user can mend into one line."""
    try:
        return work()
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (ValueError, RuntimeError, ImportError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
