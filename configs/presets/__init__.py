"""Staleness rules of known systems, each a .toml file in this folder that sets the same keys.

A preset is no complete configuration. Its keys are below those of the file that names it, and above them if the command
line names it.
"""

import tomllib
from pathlib import Path
from typing import Any, cast

from staleflow.configs.errors import ConfigError, shown

NAMES = ("areal", "prime-rl", "slime", "staleflow", "verl")

Table = dict[str, Any]


def read(name: object) -> Table:
    """Return the keys of a preset. Raises ``ConfigError`` for an unknown name."""
    if name not in NAMES:
        allowed = ", ".join(f'"{preset}"' for preset in NAMES)
        raise ConfigError("preset", name, f"it must be one of {allowed}")
    return tomllib.loads((Path(__file__).parent / f"{name}.toml").read_text(encoding="utf-8"))


def merge(lower: Table, upper: Table) -> Table:
    """Merge two tables; where both have a key, ``upper`` takes precedence."""
    merged = dict(lower)
    for key, value in upper.items():
        below = merged.get(key)
        both = isinstance(below, dict) and isinstance(value, dict)
        merged[key] = merge(cast(Table, below), cast(Table, value)) if both else value
    return merged


def named(error: ConfigError, name: str) -> ConfigError:
    """Return ``error``, extended by the name of the preset if its value comes from the preset ``name``."""
    value: Any = read(name) if name else {}
    for part in error.what.split("."):
        value = cast(Table, value).get(part) if isinstance(value, dict) else None
    if value is None or value != error.value:
        return error
    return ConfigError(error.what, error.value, f"{error.allowed}; preset {shown(name)} sets it")
