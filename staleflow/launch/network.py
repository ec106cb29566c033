"""Find the addresses and network interfaces by which other machines reach this one."""

import socket
from urllib.parse import urlsplit

import psutil

from staleflow.configs.errors import ConfigError


def own_address(towards: str) -> str:
    """Return the local address from which this machine reaches ``towards``, a host name or address. Sends nothing."""
    try:
        (family, *_, place), *_ = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError("host", towards, f"this machine cannot reach it: {error.strerror}") from None


def host_of(address: str) -> str:
    """Return the host of a ``tcp://`` address; empty for other addresses."""
    return urlsplit(address).hostname or ""


def tcp(host: str, port: int | str) -> str:
    """Return the ``tcp://`` address of a port of ``host``; IPv6 addresses get brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def interface_of(address: str) -> str:
    """Return the network interface that has this address; empty if none has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return str(name)
    return ""
