"""Keys that a resumed run may change: its length, the ranks and the backend of its trainer, and its rollout workers.

A checkpoint of ``torch``, ``ddp`` or ``fsdp`` can be read by each of them, on any number of ranks.
"""

from typing import Any

import msgspec

from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config

KEYS = (
    "trainer.steps",
    "trainer.nproc",
    "trainer.backend",
    "trainer.gpus",
    "rollout.workers",
    "rollout.gpus",
    "rollout.elastic.min_workers",
    "rollout.elastic.max_workers",
)
RESHARDABLE = ("torch", "ddp", "fsdp")
"""Backends that read each other's checkpoints."""


def with_keys_of(config: Config, other: Config) -> Config:
    """Return the configuration with the values of ``other`` for all keys that a resume may change."""
    for key in KEYS:
        config = _with(config, other, *key.split("."))
    return config


def _with(table: Any, other: Any, name: str, *below: str) -> Any:
    """Return a table with the value of ``other`` for the key ``name``, or for a key ``below`` it."""
    value = getattr(other, name)
    return msgspec.structs.replace(table, **{name: _with(getattr(table, name), value, *below) if below else value})


def check(config: Config, run: Config) -> None:
    """Raise ``ConfigError`` if a trainer with ``config`` could not read the checkpoints of ``run``."""
    new, old = config.trainer, run.trainer
    readable = new.backend in RESHARDABLE and old.backend in RESHARDABLE
    if new.backend != old.backend and not readable:
        allowed = f"the run has {old.backend!r}, whose checkpoints only it can read"
        if old.backend in RESHARDABLE:
            allowed = f"the run has {old.backend!r}; a resume may change it to one of {', '.join(RESHARDABLE)}"
        raise ConfigError("trainer.backend", new.backend, allowed)
    if new.nproc != old.nproc and new.backend == "deepspeed":
        allowed = (
            f"the run has {old.nproc}, and its DeepSpeed checkpoints fit no other number of ranks "
            "(DeepSpeed's universal checkpoints are not supported)"
        )
        raise ConfigError("trainer.nproc", new.nproc, allowed)
