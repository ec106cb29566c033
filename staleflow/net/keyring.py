"""A server's keys: its own pair, and the list of those it lets in; and how a socket is given keys."""

from dataclasses import dataclass
from typing import Final

import zmq

from staleflow.net.allow_list import AllowList
from staleflow.net.keys import Key

DOMAIN: Final = b"staleflow"
"""What handshakes are judged under. It must be set: without a domain ZeroMQ may let anybody in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyring:
    """What an endpoint needs to know friends from strangers."""

    key: Key
    allowed: AllowList


def as_server(target: "zmq.Socket[bytes]", key: Key) -> None:
    """Before it is bound: only CURVE handshakes, and each must be judged."""
    target.set(zmq.CURVE_SERVER, 1)
    target.set(zmq.CURVE_SECRETKEY, key.secret)
    target.set(zmq.ZAP_DOMAIN, DOMAIN)
    target.set(zmq.ZAP_ENFORCE_DOMAIN, 1)


def as_client(target: "zmq.Socket[bytes]", key: Key) -> None:
    """Before it connects: only to the server whose public key is in the key file."""
    target.set(zmq.CURVE_SERVERKEY, key.server)
    target.set(zmq.CURVE_PUBLICKEY, key.public)
    target.set(zmq.CURVE_SECRETKEY, key.secret)
