"""Certificates and keys for a trial: who the server is, and which nodes may join."""

import ipaddress
import os
import socket
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = timedelta(days=365)
LOOPBACK = ("localhost", "127.0.0.1", "::1")
CA, CERTIFICATE, KEY, KEYS = "ca.pem", "server.pem", "server.key", "keys"


def make_certificates(folder: Path, hosts: Sequence[str] = ()) -> None:
    """Write DIR/ca.pem, and DIR/server.pem with its key for this machine's names and others.

    The key of the authority is thrown away: nobody can sign another certificate with it.
    """
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    root = _name("rabo trial authority")
    own = (
        _certificate(root, root, authority.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), False)
        .sign(authority, hashes.SHA384())
    )
    names = dict.fromkeys([*LOOPBACK, socket.gethostname(), *hosts])
    identity = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    certificate = (
        _certificate(_name("rabo trial server"), root, server.public_key())
        .add_extension(x509.SubjectAlternativeName([_alternative(n) for n in names]), False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
        .add_extension(identity, False)
        .sign(authority, hashes.SHA384())
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CA).write_bytes(own.public_bytes(serialization.Encoding.PEM))
    (folder / CERTIFICATE).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    _write_secret(folder / KEY, server, serialization.PrivateFormat.PKCS8)


def make_keys(folder: Path, clients: int) -> list[Path]:
    """Write DIR/keys/client-I and client-I.pub for clients that have none yet."""
    if clients < 1:
        raise ValueError(f"clients must be at least 1, got {clients}")
    (folder / KEYS).mkdir(parents=True, exist_ok=True)
    paths = [folder / KEYS / f"client-{i}" for i in range(clients)]
    for path in paths:
        if not path.exists():
            key = ec.generate_private_key(ec.SECP384R1())
            _write_secret(path, key, serialization.PrivateFormat.OpenSSH)
            public = key.public_key().public_bytes(
                serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
            )
            path.with_suffix(".pub").write_bytes(public + b"\n")
    return paths


def has_certificates(folder: Path) -> bool:
    return all((folder / name).exists() for name in (CA, CERTIFICATE, KEY))


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _write_secret(
    path: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat
) -> None:
    """Write a key that only its owner can read, from the first byte on."""
    secret = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + LIFETIME)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
