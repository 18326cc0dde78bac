"""`rabo flower ...`: from nothing to a federation; parse, call, print."""

import shlex
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rabo.flower import launch
from rabo.flower.credentials import has_certificates, make_certificates, make_keys
from rabo.flower.launch import Children

app = typer.Typer(
    help="Run a federation on real machines, with Flower.",
    epilog="Example: rabo flower up trial",
    no_args_is_help=True,
)

Folder = Annotated[Path, typer.Argument(help="folder of the trial")]
Host = Annotated[str, typer.Option(help="address of the server")]
Port = Annotated[int, typer.Option(help="port of the server")]
Insecure = Annotated[bool, typer.Option("--insecure", help="without TLS and authentication")]
Options = Annotated[list[str] | None, typer.Argument(help="options of `flwr run`")]
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
    with _children() as children:
        _guarded(lambda: _join(children, folder, [client], f"{host}:{port}", node_config, insecure))
        raise typer.Exit(_guarded(children.wait))


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
                f"the node of client {client} ended (code {code}), the others go on; to start it "
                f"again: rabo flower node {folder} --client {client}",
                err=True,
            )

        raise typer.Exit(_guarded(lambda: children.wait(say)))


@app.command(
    context_settings={"ignore_unknown_options": True},
    epilog="Example: rabo flower run trial -- --run-config 'rounds=5 seed=1'",
)
def run(folder: Folder, options: Options = None) -> None:
    """Run the app on the federation: `flwr run`, with what this trial needs set."""
    _guarded(lambda: launch.check_app(folder))
    _guarded(lambda: launch.check_connection(folder))
    try:
        _run(folder, options or [])
    except _Stopped:
        typer.echo("the run goes on at the server; Ctrl-C there ends it", err=True)
        raise typer.Exit(130) from None


class _Stopped(KeyboardInterrupt):
    """Ctrl-C while a run was shown; says where it is recorded, if it has said so."""


def _run(folder: Path, options: Sequence[str]) -> None:
    """Show a run until it ends."""
    command = launch.run_command(folder, options)
    is_finished, out = False, ""
    try:
        for line in launch.stream(command, launch.environment(folder)):
            typer.echo(line, nl=False)
            is_finished = is_finished or launch.FINISHED in line
            out = out or line.partition(launch.RECORDED)[2].strip()
    except KeyboardInterrupt:
        raise _Stopped(out) from None
    if not is_finished:
        typer.echo(
            "error: the run was not finished; the reason is above. If no server answers, start it "
            f"with `rabo flower server {folder}`",
            err=True,
        )
        raise typer.Exit(1)


@app.command(
    context_settings={"ignore_unknown_options": True},
    epilog="Example: rabo flower up trial --clients 3",
)
def up(
    folder: Folder,
    options: Options = None,
    clients: Annotated[int, typer.Option(help="number of clients", min=1)] = 3,
    insecure: Insecure = False,
) -> None:
    """Start a server and nodes on this machine, run the app once, and end them all.

    Certificates and keys that are missing are made.
    """
    _guarded(lambda: launch.check_app(folder))
    if not insecure:
        _guarded(lambda: _make_missing(folder, clients))
    port = launch.free_port()
    try:
        with _children() as children:
            _guarded(lambda: _serve(children, folder, "127.0.0.1", port, insecure))
            address = f"127.0.0.1:{port}"
            _guarded(lambda: _join(children, folder, range(clients), address, "", insecure))
            _run(folder, options or [])
    except _Stopped as stopped:  # said last, after what ending processes say
        typer.echo(_how_to_go_on(folder, str(stopped), options or []), err=True)
        raise typer.Exit(130) from None


def _how_to_go_on(folder: Path, out: str, options: Sequence[str]) -> str:
    if not out:
        return "stopped before the run began"
    given = [*options, "--run-config", f'out="{out}" resume=true']
    again = f"rabo flower up {shlex.quote(str(folder))} -- {shlex.join(given)}"
    return f"stopped; what was reached is kept in {out}; to go on:\n  {again}"


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
    process = children.start(command, launch.environment(folder))
    launch.wait_for_port(here, port, process, 60)
    known = 0 if plain else register(folder, f"{here}:{port}")
    joined = "any node" if plain else f"{known} nodes with keys"
    how = "PLAIN, nothing is encrypted" if plain else "TLS"
    typer.echo(f"server on {host}:{port} ({how}); may join: {joined}")


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
        children.start(command, launch.environment(folder))
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
    except (ValueError, RuntimeError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
