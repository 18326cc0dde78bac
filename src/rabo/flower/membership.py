"""Who may join a server: the nodes whose public keys it was given."""

from pathlib import Path

import httpx
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.proto.control_pb2 import RegisterNodeRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

from rabo.flower.credentials import CA, KEYS


def register(folder: Path, address: str) -> int:
    """Let the nodes join whose public keys are in DIR/keys; return how many.

    A server remembers them: those it knows already stay as they are.
    """
    keys = sorted((folder / KEYS).glob("*.pub"))
    with ControlHttpClient.from_server_address(
        address,
        insecure=False,
        root_certificates=(folder / CA).read_bytes(),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="rabo flower server")],
    ) as client:
        for key in keys:
            public = load_ssh_public_key(key.read_bytes())
            pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
            try:
                client.RegisterNode(RegisterNodeRequest(public_key=pem))
            except httpx.HTTPStatusError as error:
                found = FlowerError.from_json(error.response.text)
                if found is None or found.code != ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE:
                    raise RuntimeError(f"{key} could not be registered: {error}") from error
    return len(keys)
