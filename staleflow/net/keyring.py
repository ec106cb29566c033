"""A server's key pair and allow-list, and how sockets are configured with keys."""

from dataclasses import dataclass
from typing import Final

import zmq

from staleflow.net.allow_list import AllowList
from staleflow.net.keys import Key

DOMAIN: Final = b"staleflow"
"""ZAP domain of all handshakes. It must be set: without a domain ZeroMQ may admit any client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyring:
    """Key pair and allow-list of an endpoint."""

    key: Key
    allowed: AllowList


def as_server(target: "zmq.Socket[bytes]", key: Key) -> None:
    """Configure a socket before it binds: accept CURVE handshakes only, each checked by the ZAP handler."""
    target.set(zmq.CURVE_SERVER, 1)
    target.set(zmq.CURVE_SECRETKEY, key.secret)
    target.set(zmq.ZAP_DOMAIN, DOMAIN)
    target.set(zmq.ZAP_ENFORCE_DOMAIN, 1)


def as_client(target: "zmq.Socket[bytes]", key: Key) -> None:
    """Configure a socket before it connects: accept only the server whose public key is in the key file."""
    target.set(zmq.CURVE_SERVERKEY, key.server)
    target.set(zmq.CURVE_PUBLICKEY, key.public)
    target.set(zmq.CURVE_SECRETKEY, key.secret)
