"""Machines reached by ssh; each one is a child process of the supervisor on the launching machine.

The standard input of a connection is the lifeline of the machine. When it closes or is silent for
``HEARTBEAT_TIMEOUT_S``, the processes there drain and exit; this covers SIGTERM here, and the loss of this machine or
of the link. An unreachable machine is retried until it answers. Meanwhile the other machines continue, and its leases
expire.
"""

import shlex
import sys
from pathlib import Path

import msgspec

from staleflow.configs.errors import ConfigError
from staleflow.configs.launch import Launch
from staleflow.configs.schema import Config
from staleflow.launch.keys import files_for
from staleflow.launch.placement import RENDEZVOUS_PORT_OFFSET, Place, machine_words, places
from staleflow.supervisor.lifeline import VARIABLE
from staleflow.supervisor.roles import Kind, Role, WorkingSince

HEARTBEAT_INTERVAL_S = 4.0
"""Seconds between two bytes on a connection's standard input."""
HEARTBEAT_TIMEOUT_S = 20.0
"""Seconds of silence after which the remote side considers the link lost; TCP may never report the loss."""


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of ``staleflow.launch.remote`` for one machine, passed on its command line as JSON."""

    host: str
    through: list[str]
    command: str
    """Command that the user's shell on the machine runs."""
    keys_in: str = ""
    """Prefix of the remote folder for the keys, which is ``$keys`` in ``command``. Empty if the run has no keys."""
    key_files: list[str] = msgspec.field(default_factory=list[str])
    """Local paths of the key files to copy."""


def check(launch: Launch) -> None:
    """Raise ``ConfigError`` unless ``launch.hosts`` has one valid host for each machine."""
    wanted = launch.trainer_nodes + launch.rollout_nodes
    if len(launch.hosts) != wanted:
        allowed = f"it must name launch.trainer_nodes + launch.rollout_nodes = {wanted} hosts, the trainer's first"
        raise ConfigError("launch.hosts", launch.hosts, allowed)
    if not launch.shell:
        raise ConfigError("launch.shell", launch.shell, 'it must be a command, for example ["ssh", "-T"]')
    if invalid := next(
        (host for host in launch.hosts if not host or host.startswith("-") or host.split() != [host]), None
    ):
        raise ConfigError("launch.hosts", invalid, "it must be a host name")


def machines(config: Config, launch: Launch, run_dir: Path, connect: str) -> list[Role]:
    """Return a role for each machine, to run beside the servers. ``config`` is the run's, without ``launch``."""
    whole = msgspec.structs.replace(config, launch=launch)
    roles = list[Role]()
    for place, host in zip(places(whole), launch.hosts, strict=True):
        reach = Reach(
            host=host,
            through=launch.shell,
            command=command_of(place, launch, connect, keys=bool(config.security.keys)),
            keys_in=f"{run_dir.name[:100]}-{place.name}" if config.security.keys else "",
            key_files=[str(path) for path in files_for(config, place)],
        )
        kind = Kind.TRAINER if place.part == "trainer" else Kind.WORKER
        words = (sys.executable, "-m", "staleflow.launch.remote", msgspec.json.encode(reach).decode())
        roles.append(Role(name=place.name, kind=kind, command=words, works=WorkingSince.MACHINE))
    return roles


def command_of(place: Place, launch: Launch, connect: str, *, keys: bool) -> str:
    """Return the shell command for a machine.

    It runs in the working directory of this process if that exists there, else in the user's home. ``keys``: whether
    the folder ``$keys`` contains keys.
    """
    python = "python" if launch.setup else shlex.quote(sys.executable)
    setup = f"{launch.setup} && " if launch.setup else ""
    key = 'STALEFLOW_KEY="$keys" ' if keys else ""
    here = shlex.quote(str(Path.cwd()))
    words = machine_words(place, connect, meet=f"{launch.hosts[0]}:{launch.port + RENDEZVOUS_PORT_OFFSET}")
    lifeline = f"{VARIABLE}=0:{HEARTBEAT_TIMEOUT_S:g}"
    return f"cd {here} 2>/dev/null || cd; {setup}{key}{lifeline} exec {python} {shlex.join(words)}"
