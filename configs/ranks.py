"""Which rank of the trainer a process is: torchrun's variables, read in one place. Standard library only."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from staleflow.configs.errors import ConfigError

LISTEN_FD: Final = "STALEFLOW_RANKS_FD"
"""Environment: number of an inherited socket of rank 0, bound to loopback, on which the ranks meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One process among ``world``; the only one by default."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0

    @property
    def leads(self) -> bool:
        """True for the rank that talks to the service."""
        return self.rank == 0


def place(environment: Mapping[str, str] | None = None) -> Place:
    """As torchrun or the deepspeed launcher says in the environment; alone when neither did. ``ConfigError``."""
    found = os.environ if environment is None else environment
    if "WORLD_SIZE" not in found:
        return Place()
    numbers = {name: _number(found, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    rank, world = numbers["RANK"], numbers["WORLD_SIZE"]
    if not 0 <= rank < max(world, 1):
        raise ConfigError("RANK", rank, f"with WORLD_SIZE {world} it must be 0 to {max(world, 1) - 1}")
    if world <= 1:
        return Place(local_rank=numbers["LOCAL_RANK"])
    return Place(
        rank=rank,
        world=world,
        local_rank=numbers["LOCAL_RANK"],
        master_addr=found.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(found, "MASTER_PORT"),
    )


def launched() -> bool:
    """True in a process that torchrun, the deepspeed launcher or this package's own started as a rank."""
    return "WORLD_SIZE" in os.environ


def _number(found: Mapping[str, str], name: str) -> int:
    value = found.get(name, "")
    if not value.isdecimal():
        raise ConfigError(name, value, "the launcher (torchrun, deepspeed) must set it to a number")
    return int(value)
