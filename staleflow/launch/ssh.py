"""Machines reached by ssh: each is one child of the supervisor on the machine that launches.

A connection's standard input is the machine's lifeline: when it closes, or is silent for ``SILENT_S``, by SIGTERM here,
by the end of this machine or of the link, the processes there drain and end. A machine that cannot be reached is tried
again and again: others go on meanwhile, its leases expire, and it joins when it is back.
"""

import shlex
import sys
from pathlib import Path

import msgspec

from staleflow.configs.errors import ConfigError
from staleflow.configs.launch import Launch
from staleflow.configs.schema import Config
from staleflow.launch.keys import files_for
from staleflow.launch.placement import MEET, Place, machine_words, places
from staleflow.supervisor.lifeline import VARIABLE
from staleflow.supervisor.roles import Kind, Role, Works

BEAT_S = 4.0
"""Between two bytes on a connection's standard input."""
SILENT_S = 20.0
"""Without any the link is lost, or this machine is, and nobody there may ever be told otherwise."""


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """What ``staleflow.launch.remote`` needs to know of one machine; written to its standard input as JSON."""

    host: str
    through: list[str]
    command: str
    """Run there, by the shell of its user."""
    keys_in: str = ""
    """Beginning of the name of the folder there that has the keys, ``$keys`` in ``command``. Empty: there are none."""
    key_files: list[str] = msgspec.field(default_factory=list[str])
    """Here."""


def check(launch: Launch) -> None:
    """``ConfigError`` unless there is a host for each machine."""
    wanted = launch.trainer_nodes + launch.rollout_nodes
    if len(launch.hosts) != wanted:
        allowed = f"it must name launch.trainer_nodes + launch.rollout_nodes = {wanted} hosts, the trainer's first"
        raise ConfigError("launch.hosts", launch.hosts, allowed)
    if not launch.shell:
        raise ConfigError("launch.shell", launch.shell, 'it must be a command, say ["ssh", "-T"]')
    if wrong := next(
        (host for host in launch.hosts if not host or host.startswith("-") or host.split() != [host]), None
    ):
        raise ConfigError("launch.hosts", wrong, "it must be the name of a host")


def machines(config: Config, launch: Launch, run_dir: Path, connect: str) -> list[Role]:
    """A role for each machine, to be started beside the servers. ``config`` is the run's, without ``launch``."""
    whole = msgspec.structs.replace(config, launch=launch)
    found = list[Role]()
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
        found.append(Role(name=place.name, kind=kind, command=words, works=Works.MACHINE))
    return found


def command_of(place: Place, launch: Launch, connect: str, *, keys: bool) -> str:
    """Shell command for a machine, in the folder of this process where that is there too, else in the user's home.
    ``keys``: they are in the folder ``$keys``."""
    python = "python" if launch.setup else shlex.quote(sys.executable)
    setup = f"{launch.setup} && " if launch.setup else ""
    key = 'STALEFLOW_KEY="$keys" ' if keys else ""
    here = shlex.quote(str(Path.cwd()))
    words = machine_words(place, connect, meet=f"{launch.hosts[0]}:{launch.port + MEET}")
    return f"cd {here} 2>/dev/null || cd; {setup}{key}{VARIABLE}=0:{SILENT_S:g} exec {python} {shlex.join(words)}"
