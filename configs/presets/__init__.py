"""The staleness rules of systems that people know, each a .toml beside this file that sets the same keys.

A preset is no configuration of its own: its keys lie below those of the file that names it, and above them when it is
named on the command line.
"""

import tomllib
from pathlib import Path
from typing import Any, cast

from staleflow.configs.errors import ConfigError, shown

NAMES = ("areal", "prime-rl", "slime", "staleflow", "verl")

Table = dict[str, Any]


def read(name: object) -> Table:
    """The keys of a preset; ``ConfigError`` when there is none of that name."""
    if name not in NAMES:
        known = ", ".join(f'"{known}"' for known in NAMES)
        raise ConfigError("preset", name, f"it must be one of {known}")
    return tomllib.loads((Path(__file__).parent / f"{name}.toml").read_text(encoding="utf-8"))


def beneath(lower: Table, upper: Table) -> Table:
    """Both tables in one; where they have the same key, ``upper`` counts."""
    found = dict(lower)
    for key, value in upper.items():
        below = found.get(key)
        both = isinstance(below, dict) and isinstance(value, dict)
        found[key] = beneath(cast(Table, below), cast(Table, value)) if both else value
    return found


def named(error: ConfigError, name: str) -> ConfigError:
    """``error``; of a value that comes from the preset ``name`` it says so."""
    value: Any = read(name) if name else {}
    for part in error.what.split("."):
        value = cast(Table, value).get(part) if isinstance(value, dict) else None
    if value is None or value != error.value:
        return error
    return ConfigError(error.what, error.value, f"{error.allowed}; preset {shown(name)} sets it")
