"""A configuration as it may be passed on: in a page, to W&B."""

from collections.abc import Iterable
from typing import Any, cast

import msgspec

from staleflow.configs.errors import MISSING
from staleflow.configs.schema import Config, Prompts, Reward

SECRET = ("api_key", "password", "secret", "access_token")
"""Ends of the names of options that are not shown."""


def settings(config: Config) -> dict[str, Any]:
    """Every key as plain values, but what users gave their own code as a secret."""
    table: dict[str, Any] = _masked(msgspec.to_builtins(config))
    return table


def changes(config: Config) -> list[tuple[str, object, object]]:
    """Every key that is not at its default: dotted name, value, default (``MISSING`` when it has none)."""
    ours = dict(_leaves(settings(config), ""))
    defaults = dict(_leaves(settings(Config(prompts=Prompts(), reward=Reward(run=""))), ""))
    return [
        (key, value, defaults.get(key, MISSING)) for key, value in ours.items() if defaults.get(key, MISSING) != value
    ]


def _masked(value: Any) -> Any:
    if isinstance(value, list):
        return [_masked(item) for item in cast(Iterable[Any], value)]
    if not isinstance(value, dict):
        return value
    table = cast(dict[str, Any], value)
    return {key: "(not shown)" if key.endswith(SECRET) else _masked(inner) for key, inner in table.items()}


def _leaves(value: Any, path: str) -> list[tuple[str, object]]:
    if isinstance(value, dict) and value:
        table = cast(dict[str, Any], value)
        return [leaf for key, inner in table.items() for leaf in _leaves(inner, f"{path}.{key}" if path else key)]
    return [(path, value)]
