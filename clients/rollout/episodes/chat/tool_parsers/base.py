"""The parser of one family's tool calls, and the parts that all of them share."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from staleflow.clients.rollout.episodes.chat.json_values import fields


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A tool call in the text of an answer."""

    name: str
    arguments: str
    """A JSON object."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """An answer's text, split. Without calls, ``content`` is the whole text."""

    content: str
    calls: tuple[WrittenCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolParser:
    """The format in which one family of models writes tool calls."""

    name: str
    markers: tuple[str, ...]
    """Tokens of the format, which are decoded although the tokenizer may regard them as special."""
    recognises: Callable[[str], bool]
    """Return whether a chat template is of this family."""
    parse: Callable[[str], Parsed]
    """Split a text without stop token. A text whose calls are malformed is content as a whole."""


def written_call(value: object, *keys: str) -> WrittenCall | None:
    """Return the call that a decoded JSON object names; its arguments are under one of ``keys``."""
    written = fields(value)
    name, key = written.get("name"), next((key for key in keys if key in written), "")
    arguments: object = written.get(key, {})
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return WrittenCall(name, json.dumps(arguments, ensure_ascii=False))


def decoded(text: str) -> object:
    """Decode a JSON text; None if it is none."""
    try:
        return cast(object, json.loads(text))
    except (ValueError, RecursionError):
        return None
