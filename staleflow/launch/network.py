"""By which of its addresses this machine is known to another one."""

import socket
from urllib.parse import urlsplit

import psutil

from staleflow.configs.errors import ConfigError


def own_address(towards: str) -> str:
    """The address from which this machine reaches ``towards`` (a host name or an address). Nothing is sent."""
    try:
        (family, *_, place), *_ = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError("host", towards, f"this machine does not reach it: {error.strerror}") from None


def host_of(address: str) -> str:
    """The host of a ``tcp://`` address; empty for another one."""
    return urlsplit(address).hostname or ""


def tcp(host: str, port: int | str) -> str:
    """``tcp://`` address of a host's port."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def interface_of(address: str) -> str:
    """The network interface that has this address; empty if none has."""
    for name, found in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in found):
            return str(name)
    return ""
