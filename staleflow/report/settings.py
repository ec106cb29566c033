"""Redact secrets from a configuration before it is shown in a page or sent to W&B."""

import re
from collections.abc import Iterable
from typing import Any, Final, cast

import msgspec

from staleflow.configs.errors import MISSING
from staleflow.configs.schema import Config, Prompts, Reward

HIDDEN: Final = "(not shown)"
_SECRET: Final = re.compile(
    r"(?<!mon)key(?!word)|token(?!iz)|secret|pass(?!age)|pwd|credential|authorization|bearer|cookie", re.IGNORECASE
)
"""Part of the name of an option whose value is hidden; it hides some harmless options rather than miss a secret."""
_USERINFO: Final = re.compile(r"(?<=://)[^/?#\s]*@")
_GIVEN: Final = re.compile(rf"((?:^|[?&;\s])[^=&;#\s]*(?:{_SECRET.pattern})[^=&;#\s]*=)[^&;#\s]+", re.IGNORECASE)
"""Secrets in the query of a URL or in a command (``launch.setup``)."""


def settings(config: Config) -> dict[str, Any]:
    """Return every key as plain values, with secrets in user options and in URLs redacted."""
    table: dict[str, Any] = _shown(msgspec.to_builtins(config), of_user=False, secret=False)
    return table


def changes(config: Config) -> list[tuple[str, object, object]]:
    """Return every key that differs from its default: dotted name, value, default (``MISSING`` if it has none)."""
    ours = dict(_leaves(settings(config), ""))
    defaults = dict(_leaves(settings(Config(prompts=Prompts(), reward=Reward(run=""))), ""))
    return [
        (key, value, defaults.get(key, MISSING)) for key, value in ours.items() if defaults.get(key, MISSING) != value
    ]


def _shown(value: Any, *, of_user: bool, secret: bool) -> Any:
    """Redact ``value``. ``of_user``: inside a table of ``options``, whose keys the user chose.

    Numbers such as ``max_new_tokens`` are never secrets.
    """
    match value:
        case str():
            return HIDDEN if secret and value else _GIVEN.sub(rf"\1{HIDDEN}", _USERINFO.sub("", value))
        case list():
            return [_shown(item, of_user=of_user, secret=secret) for item in cast(Iterable[Any], value)]
        case dict():
            return {
                key: _shown(
                    inner,
                    of_user=of_user or key == "options",
                    secret=secret or (of_user and _SECRET.search(key) is not None),
                )
                for key, inner in cast(dict[str, Any], value).items()
            }
        case _:
            return value


def _leaves(value: Any, path: str) -> list[tuple[str, object]]:
    if isinstance(value, dict) and value:
        table = cast(dict[str, Any], value)
        return [leaf for key, inner in table.items() for leaf in _leaves(inner, f"{path}.{key}" if path else key)]
    return [(path, value)]
