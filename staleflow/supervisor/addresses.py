"""Is an address free? Asked before anything is started; binding asks again."""

import errno
import socket
from pathlib import Path
from urllib.parse import urlsplit

from staleflow.configs.errors import ConfigError
from staleflow.configs.load import planned
from staleflow.configs.schema import Config


def check_free(config: Config, run_dir: Path) -> None:
    """``ConfigError`` for the first address of the run that somebody listens on."""
    bound = planned(config, run_dir)
    names = ["scheduler.bind", *["trajectories.bind"] * len(bound.trajectories), "parameters.bind"]
    wanted = [*zip(names, bound.all, strict=True)]
    if config.metrics.bind:
        wanted.append(("metrics.bind", config.metrics.bind))
    if config.parameters.direct_bind:
        wanted.append(("parameters.direct_bind", config.parameters.direct_bind))
    for name, address in wanted:
        if in_use(address):
            raise ConfigError(name, address, "it is in use; choose another, or end the process that has it")


def in_use(address: str) -> bool:
    """True when another process listens there."""
    if address.startswith("ipc://"):
        return _listens(address.removeprefix("ipc://"))
    parts = urlsplit(address)
    host = parts.hostname or ""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, parts.port or 0))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError as error:
            return error.errno == errno.EAGAIN  # its backlog is full
    return True
