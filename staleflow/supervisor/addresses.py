"""Check whether addresses are free or have a listener, before processes start or connect.

The checks give early, clear errors; they are advisory, because another process may bind in between.
"""

import errno
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import planned
from staleflow.configs.schema import Config
from staleflow.net.addresses import is_wildcard


def check_free(config: Config, run_dir: Path) -> None:
    """Raise ``ConfigError`` for the first address of the run that another process listens on."""
    for key, address in binds(config, planned(config, run_dir).all):
        if in_use(address):
            raise ConfigError(key, address, "it is in use; choose another, or stop the process that uses it")


def binds(config: Config, servers: Sequence[str]) -> list[tuple[str, str]]:
    """Return (configuration key, address) for every address that a run binds.

    ``servers``: scheduler, trajectory servers, parameter server, in this order. Empty addresses are left out.
    """
    keys = ["scheduler.bind", *["trajectories.bind"] * (len(servers) - 2), "parameters.bind"]
    pairs = [
        *zip(keys, servers, strict=True),
        ("metrics.bind", config.metrics.bind),
        ("parameters.direct_bind", config.parameters.direct_bind),
    ]
    return [(key, address) for key, address in pairs if address]


def in_use(address: str) -> bool:
    """Return True if another process of this machine listens there."""
    if address.startswith("ipc://"):
        return _listens(address.removeprefix("ipc://"))
    return _bind_errno(address) == errno.EADDRINUSE


def may_answer(address: str) -> bool:
    """Return False if the address is on this machine and has no listener; True for addresses of other machines."""
    if address.startswith("ipc://"):
        return _listens(address.removeprefix("ipc://"))
    return _bind_errno(address) != 0


def no_listener(address: str) -> str:
    """Explain to a user what it means for the run that no process listens at ``address``."""
    if is_wildcard(address):
        port = urlsplit(address).port
        return f"the run has ended, or its servers are on another machine: --connect tcp://THAT-MACHINE:{port}"
    return "the run has ended, or was never started"


def silence(address: str) -> str:
    """Explain why a server of this machine that listens at ``address`` does not answer; empty if none listens here."""
    if not in_use(address):
        return ""
    process = _listener(address)
    if process is None:
        return "its process listens, but is stopped or waits for its disk"
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return f"its process {process} has ended"
    if state in ("T", "t"):
        return f"its process {process} is stopped; kill -CONT {process} continues it"
    if state == "D":
        return f"its process {process} waits for its disk"
    return f"its process {process} is running and busy, or waits for its disk"


def _listener(address: str) -> int | None:
    """Return the process that listens on an ipc address of this machine; None if that is not known."""
    if not address.startswith("ipc://"):
        return None
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(address.removeprefix("ipc://"))
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except (OSError, AttributeError):  # SO_PEERCRED exists on Linux only
            return None
    process: int = struct.unpack("3i", credentials)[0]
    return process


def _bind_errno(address: str) -> int:
    """Return the errno of binding there, such as EADDRNOTAVAIL for another machine's address; 0 if it is free."""
    parts = urlsplit(address)
    host = parts.hostname or ""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, parts.port or 0))
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError as error:
            return error.errno == errno.EAGAIN  # its backlog is full
    return True
