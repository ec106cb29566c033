"""The rank of a trainer process, read from torchrun's environment variables. Standard library only."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from staleflow.configs.errors import ConfigError

LISTEN_FD: Final = "STALEFLOW_RANKS_FD"
"""Environment variable with the number of an inherited socket of rank 0, bound to loopback, for the rendezvous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One process among ``world``; by default the only one."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0

    @property
    def leads(self) -> bool:
        """True for the rank that communicates with the service."""
        return self.rank == 0


def place(environment: Mapping[str, str] | None = None) -> Place:
    """Return the rank set by torchrun or the deepspeed launcher; a single process without either.

    Raises ``ConfigError`` if the variables are incomplete or contradictory.
    """
    variables = os.environ if environment is None else environment
    if "WORLD_SIZE" not in variables:
        return Place()
    numbers = {name: _number(variables, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    rank, world = numbers["RANK"], numbers["WORLD_SIZE"]
    if not 0 <= rank < max(world, 1):
        raise ConfigError("RANK", rank, f"with WORLD_SIZE {world} it must be 0 to {max(world, 1) - 1}")
    if world <= 1:
        return Place(local_rank=numbers["LOCAL_RANK"])
    return Place(
        rank=rank,
        world=world,
        local_rank=numbers["LOCAL_RANK"],
        master_addr=variables.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(variables, "MASTER_PORT"),
    )


def launched() -> bool:
    """Return True in a process that torchrun, the deepspeed launcher or this package's launcher started as a rank."""
    return "WORLD_SIZE" in os.environ


def _number(variables: Mapping[str, str], name: str) -> int:
    value = variables.get(name, "")
    if not value.isdecimal():
        raise ConfigError(name, value, "the launcher (torchrun, deepspeed) must set it to a number")
    return int(value)
