"""Validate addresses early, with clear errors, before ZeroMQ reports vague ones."""

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
"""Longest path of a Unix socket on Linux."""

_TCP: Final = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.%]+\]|[^:/\[\];\s]+):(?P<port>\*|\d{1,5})")
_LOOPBACK_ONLY: Final = (
    "without keys (security.keys) it must be on the loopback interface (127.0.0.1, [::1]) or an ipc:// path"
)
_WILDCARDS: Final = ("0.0.0.0", "::")
_SYNTAX: Final = "it must be tcp://host:port or ipc:///path"


def check_connect(address: str) -> str:
    """Return ``address`` if a client can connect to it, else raise ``ConfigError``."""
    if address.startswith("ipc://"):
        return _check_ipc(address)
    host, port = split_tcp(address)
    if port == 0 or host == "*":
        raise ConfigError("address", address, "a client needs the host and port of a server")
    return address


def check_bind(address: str, *, wide: bool = False) -> str:
    """Return the address to bind. Raise ``ConfigError`` if it is malformed or reaches beyond loopback without
    permission.

    ``wide`` permits more than loopback. A host name or another spelling of an address is then resolved to the address
    itself.
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
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ConfigError("bind", address, "it names no address of this machine; write the address itself") from None
    return ipaddress.ip_address(str(addresses[0][4][0]))


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach the address."""
    try:
        return address.startswith("ipc://") or check_bind(address) != ""
    except ConfigError:
        return False


def is_wildcard(address: str) -> bool:
    """Return whether the address means every interface, and so is no destination to hand to clients."""
    return address.startswith("tcp://") and split_tcp(address)[0] in (*_WILDCARDS, "*")


def reachable(endpoint: str, via: str) -> str:
    """Return the address at which a client that reaches the scheduler at ``via`` reaches a server bound to
    ``endpoint``.

    A server bound to every interface does not know which of them clients use. It is assumed to share the scheduler's
    host.
    """
    if not endpoint.startswith("tcp://") or not via.startswith("tcp://"):
        return endpoint
    host, port = split_tcp(endpoint)
    if host not in _WILDCARDS:
        return endpoint
    return f"{via.rpartition(':')[0]}:{port}"


def bind(target: "zmq.Socket[bytes]", address: str, *, wide: bool = False) -> str:
    """Bind and return the real address (port 0 resolved). Raise ``ConfigError`` with the address on failure."""
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
        Path(checked.removeprefix("ipc://")).chmod(0o600)  # only this user may connect, whatever the folder's mode
    return target.get_string(zmq.LAST_ENDPOINT).rstrip("\0")


def split_tcp(address: str) -> tuple[str, int]:
    """Return host (without brackets) and port of ``tcp://host:port``; port 0 for ``*``. Raise ``ConfigError``
    otherwise."""
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
    """Remove the socket file of a dead process. Raise ``ConfigError`` if it is in use or no socket."""
    if not path.parent.is_dir():
        raise ConfigError("bind", address, f"the folder {path.parent} must exist")
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError("bind", address, "a file that is not a socket has this path; choose another path")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except FileNotFoundError:
            return
        except BlockingIOError:  # its backlog is full, so a process listens
            pass
    raise ConfigError("bind", address, "it is in use; it must be free")
