"""Addresses: what may be bound or connected to, said plainly before ZeroMQ says it darkly."""

import errno
import ipaddress
import re
import socket
import stat
from pathlib import Path
from typing import Final

import zmq

from staleflow.configs.errors import ConfigError

IPC_PATH_BYTES: Final = 107
"""The longest path of a Unix socket on Linux."""

_TCP: Final = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.%]+\]|[^:/\[\];\s]+):(?P<port>\*|\d{1,5})")
_LOOPBACK_ONLY: Final = (
    "without keys (security.keys) it must be on the loopback interface (127.0.0.1, [::1]) or an ipc:// path"
)
_WILDCARDS: Final = ("0.0.0.0", "::")
_SYNTAX: Final = "it must be tcp://host:port or ipc:///path"


def check_connect(address: str) -> str:
    """``address`` if a client can connect to it, else ``ConfigError``."""
    if address.startswith("ipc://"):
        return _check_ipc(address)
    host, port = split_tcp(address)
    if port == 0 or host == "*":
        raise ConfigError("address", address, "a client needs the host and port of a server")
    return address


def check_bind(address: str, *, wide: bool = False) -> str:
    """The address to bind; ``ConfigError`` for one that is not an address, or reaches beyond loopback and may not.

    ``wide``: it may. Then a host name or another spelling of an address becomes the address itself.
    """
    if address.startswith("ipc://"):
        return _check_ipc(address)
    host, port = split_tcp(address)
    if host == "localhost":
        host = "127.0.0.1"
    if host == "*" and wide:
        host = "0.0.0.0"
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        if not wide:
            raise ConfigError("bind", address, _LOOPBACK_ONLY) from None
        ip = _resolved(host, address)
    if not ip.is_loopback and not wide:
        raise ConfigError("bind", address, _LOOPBACK_ONLY)
    return f"tcp://{f'[{ip}]' if ip.version == 6 else ip}:{port or '*'}"


def _resolved(host: str, address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ConfigError("bind", address, "it names no address of this machine; write the address itself") from None
    return ipaddress.ip_address(str(found[0][4][0]))


def is_loopback(address: str) -> bool:
    """Whether nobody on another machine can be at the other end."""
    try:
        return address.startswith("ipc://") or check_bind(address) != ""
    except ConfigError:
        return False


def is_wildcard(address: str) -> bool:
    """Whether it means every interface of a machine, and so no place that others could be sent to."""
    return address.startswith("tcp://") and split_tcp(address)[0] in (*_WILDCARDS, "*")


def reachable(endpoint: str, via: str) -> str:
    """Where a server that says it is at ``endpoint`` is reached by who reaches its scheduler at ``via``.

    A server that is bound to every interface does not know which of them that is: it is taken to be where the
    scheduler is.
    """
    if not endpoint.startswith("tcp://") or not via.startswith("tcp://"):
        return endpoint
    host, port = split_tcp(endpoint)
    if host not in _WILDCARDS:
        return endpoint
    return f"{via.rpartition(':')[0]}:{port}"


def bind(target: "zmq.Socket[bytes]", address: str, *, wide: bool = False) -> str:
    """Bind and return the real address (port 0 resolved). ``ConfigError`` naming the address if that cannot be."""
    checked = check_bind(address, wide=wide)
    if checked.startswith("ipc://"):
        _free_ipc(Path(checked.removeprefix("ipc://")), address)
    target.set(zmq.IPV6, int("[" in checked))
    try:
        target.bind(checked)
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError("bind", address, "it is in use; it must be free") from None
        raise ConfigError("bind", address, f"the system refuses it: {error.strerror}") from None
    if checked.startswith("ipc://"):
        Path(checked.removeprefix("ipc://")).chmod(0o600)  # only this user may connect, whatever folder it is in
    return target.get_string(zmq.LAST_ENDPOINT).rstrip("\0")


def split_tcp(address: str) -> tuple[str, int]:
    """Host, without brackets, and port of ``tcp://host:port``; port 0 for ``*``. ``ConfigError`` for anything else."""
    if (match := _TCP.fullmatch(address)) is None:
        raise ConfigError("address", address, _SYNTAX)
    port = 0 if match["port"] == "*" else int(match["port"])
    if port > 65_535:
        raise ConfigError("address", address, "a port is at most 65535")
    return match["host"].strip("[]"), port


def _check_ipc(address: str) -> str:
    path = address.removeprefix("ipc://")
    if not path.startswith("/"):
        raise ConfigError("address", address, "the path of an ipc:// address must be absolute")
    if (size := len(path.encode())) > IPC_PATH_BYTES:
        raise ConfigError("address", address, f"its path has {size} bytes, the system takes {IPC_PATH_BYTES}")
    return address


def _free_ipc(path: Path, address: str) -> None:
    """Remove the socket file of a dead process. ``ConfigError`` if somebody listens on it, or it is no socket."""
    if not path.parent.is_dir():
        raise ConfigError("bind", address, f"the folder {path.parent} must exist")
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError("bind", address, "there is a file that is not a socket; it is left alone")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except FileNotFoundError:
            return
        except BlockingIOError:  # its backlog is full: somebody listens
            pass
    raise ConfigError("bind", address, "it is in use; it must be free")
