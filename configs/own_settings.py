"""Settings that may differ between the rollout workers of a run. Pure.

All other settings are shared: every process of a run has the same (``loading.load.config_sha``).
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from staleflow.configs.loading.toml import value_text
from staleflow.configs.schema import Config, Environment, Rollout

OWN: Final = {
    "rollout": (
        "engine",
        "engine_options",
        "max_inflight",
        "weights_from",
        "threads",
        "simulated",
        "vllm",
        "vllm_server",
    ),
    "environment": ("host", "port", "advertise"),
}
"""Keys that a rollout worker may have a value of its own for, by table."""
STARTED: Final = ("workers", "gpus", "pool")
"""Keys of ``rollout`` that only the process which starts the workers reads."""
NAMES: Final = ", ".join(f"{table}.{name}" for table, names in OWN.items() for name in names)
_TABLES: Final = ("simulated", "vllm", "vllm_server")
"""Own keys that are tables of the schema."""


def is_own(path: tuple[str, ...]) -> bool:
    """Return whether rollout workers may have different values of a key."""
    return len(path) > 1 and path[1] in OWN.get(path[0], ())


def without_own(config: Config, engine: str) -> Config:
    """Return ``config`` with ``engine`` and the defaults of all other settings that need not be shared."""
    rollout = {name: getattr(Rollout(), name) for name in (*OWN["rollout"], *STARTED)} | {"engine": engine}
    environment = {name: getattr(Environment(), name) for name in OWN["environment"]}
    return msgspec.structs.replace(
        config,
        rollout=msgspec.structs.replace(config.rollout, **rollout),
        environment=msgspec.structs.replace(config.environment, **environment),
    )


def as_overrides(worker: Config, run: Config) -> list[str]:
    """Return the overrides with which a worker of ``run`` has the own settings of ``worker``."""
    theirs = dict(_own_values(run))
    return [f"{key}={value_text(value)}" for key, value in _own_values(worker) if value != theirs[key]]


def _own_values(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield each own key with its value."""
    table: dict[str, Any] = msgspec.to_builtins(config)
    for section, names in OWN.items():
        for name in names:
            value = table[section][name]
            if name in _TABLES:
                yield from ((f"{section}.{name}.{key}", inner) for key, inner in value.items())
            else:
                yield f"{section}.{name}", value
