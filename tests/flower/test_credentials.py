"""Keys that only their owner can read, and a server that plain text cannot reach from outside."""

import ssl
import stat

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from typer.testing import CliRunner

from rabo.cli import app
from rabo.flower import launch
from rabo.flower.credentials import is_loopback, make_certificates, make_keys
from rabo.flower.launch import Children, check_node, new_app, node_command, server_command

RUN = CliRunner()


def test_the_server_proves_itself_to_those_who_know_the_authority(tmp_path):
    make_certificates(tmp_path, ["lab.example.org", "192.0.2.7"])
    context = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    for name in ("localhost", "127.0.0.1", "lab.example.org", "192.0.2.7"):
        assert _shake_hands(context, server, name)
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        _shake_hands(context, server, "other.example.org")
    make_certificates(tmp_path / "other")
    stranger = ssl.create_default_context(cafile=tmp_path / "other" / "ca.pem")
    with pytest.raises(ssl.SSLCertVerificationError):
        _shake_hands(stranger, server, "localhost")


def _shake_hands(client, server, name):
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    mine = client.wrap_bio(to_client, to_server, server_hostname=name)
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    for end in (mine, theirs, mine, theirs):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return mine.version() == "TLSv1.3"


def test_secrets_are_for_their_owner_alone_and_stay_out_of_the_app_and_of_what_is_printed(tmp_path):
    folder = tmp_path / "trial"
    outputs = [
        RUN.invoke(app, ["flower", *words]).output
        for words in (["new", str(folder)], ["keys", str(folder), "--clients", "2"])
    ]
    secrets = [folder / "server.key", folder / "keys" / "client-0", folder / "keys" / "client-1"]
    for secret in secrets:
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        assert secret.read_text().splitlines()[1] not in "".join(outputs)
    assert {p.name for p in (folder / "app").iterdir()} == {
        "pyproject.toml",
        "rabo_app.py",
        "problem.py",
    }
    commands = [
        server_command(folder, "127.0.0.1", 1, False),
        node_command(folder, 0, "h:1", False),
    ]
    assert not any("BEGIN" in word for command in commands for word in command)


def test_a_key_pair_belongs_together_and_is_kept_when_more_are_made(tmp_path):
    first = make_keys(tmp_path, 1)[0].read_bytes()
    paths = make_keys(tmp_path, 3)
    assert paths[0].read_bytes() == first
    publics = set()
    for path in paths:
        private = load_ssh_private_key(path.read_bytes(), None)
        public = load_ssh_public_key(path.with_suffix(".pub").read_bytes())
        assert private.public_key() == public
        publics.add(path.with_suffix(".pub").read_bytes())
    assert len(publics) == 3
    with pytest.raises(ValueError, match="at least 1"):
        make_keys(tmp_path, 0)


def test_the_authority_signs_nothing_else(tmp_path):
    make_certificates(tmp_path)
    authority = x509.load_pem_x509_certificate((tmp_path / "ca.pem").read_bytes())
    limits = authority.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (limits.ca, limits.path_length) == (True, 0)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("ca") and p.suffix == ".key"]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "lab.example.org"])
def test_a_server_without_certificates_is_refused_unless_asked_for(tmp_path, monkeypatch, host):
    started = []
    monkeypatch.setattr(Children, "start", lambda _, command, *more: started.append(command))
    monkeypatch.setattr(launch, "wait_for_port", lambda *_: None)
    words = ["flower", "server", str(tmp_path / "trial"), "--host", host]
    result = RUN.invoke(app, words)
    assert result.exit_code == 1
    assert "has no certificates: run" in result.output
    assert f"`rabo flower keys {tmp_path / 'trial'}`, or give --insecure" in result.output
    assert ("rabo flower certificates" in result.output) == (not is_loopback(host))
    assert started == list(tmp_path.iterdir()) == []
    monkeypatch.setattr(Children, "wait", lambda _: 0)
    monkeypatch.setattr(Children, "__exit__", lambda *_: None)
    assert "PLAIN" in RUN.invoke(app, [*words, "--insecure"]).output
    assert "--insecure" in started[0]


def test_a_node_needs_the_authority_and_its_own_key_and_nothing_else(tmp_path):
    make_certificates(tmp_path)
    make_keys(tmp_path, 2)
    there = tmp_path / "there"
    (there / "keys").mkdir(parents=True)
    for name in ("ca.pem", "keys/client-1"):
        (there / name).write_bytes((tmp_path / name).read_bytes())
    check_node(there, 1)
    with pytest.raises(ValueError, match="client-0 is missing"):
        check_node(there, 0)
    assert is_loopback("::1")
    assert not is_loopback("10.0.0.1")


def test_an_app_is_not_written_over(tmp_path):
    new_app(tmp_path)
    with pytest.raises(ValueError, match="already holds an app"):
        new_app(tmp_path)
