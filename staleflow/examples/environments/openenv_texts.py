"""The text of an answer as an action of OpenEnv, and an observation as the text of a message."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from staleflow.configs.imports import load_object

KEY = "environment.options"

MakeAction = Callable[[str], Mapping[str, Any]]
ReadObservation = Callable[[Mapping[str, Any]], str]

OWN = frozenset({"metadata", "reward", "done"})
"""Fields of every action or observation, which carry no text for the policy."""


def action_maker(option: str, schema: Mapping[str, Any]) -> MakeAction:
    """Return the function from an answer's text to an action. ``schema``: JSON schema of the environment's actions.

    ``option`` is a field that gets the text, the import path of a function, or empty: the only field that is required.
    """
    if ":" in option:
        return _function(option, "action")
    required = [name for name in _fields(schema) if name in schema.get("required", [])]
    field = _field(option, "action", required, "required field", _fields(schema))
    return lambda text: {field: text}


def observation_reader(option: str, schema: Mapping[str, Any]) -> ReadObservation:
    """Return the function from an observation to a message's text. ``schema``: JSON schema of the observations.

    ``option`` is a field, the import path of a function, or empty: the only field of text.
    """
    if ":" in option:
        return _function(option, "observation")
    fields = _fields(schema)
    texts = [name for name in fields if schema["properties"][name].get("type") == "string"]
    field = _field(option, "observation", texts, "field of text", fields)

    def read(observation: Mapping[str, Any]) -> str:
        value = observation.get(field, "")
        return value if isinstance(value, str) else json.dumps(value)

    return read


def json_object(text: str) -> Mapping[str, Any]:
    """Return the action that an answer writes as a JSON object. ``ValueError`` if it is none."""
    action = json.loads(text)
    if not isinstance(action, dict):
        raise ValueError("the answer is no JSON object")
    return action  # pyright: ignore[reportUnknownVariableType]


def _fields(schema: Mapping[str, Any]) -> list[str]:
    return [name for name in schema.get("properties", {}) if name not in OWN]


def _field(option: str, name: str, candidates: list[str], kind: str, fields: list[str]) -> str:
    allowed = f"it must be one of {', '.join(fields) or 'no fields'}, or a function as module:function"
    if option and option not in fields:
        raise ValueError(f"{KEY}.{name}={option!r} is no field of the environment's {name}; {allowed}")
    if not option and len(candidates) != 1:
        raise ValueError(f"{KEY}.{name} is not set, and the {name} has {len(candidates)} {kind}s; {allowed}")
    return option or candidates[0]


def _function(option: str, name: str) -> Callable[[Any], Any]:
    function = load_object(option, f"{KEY}.{name}")
    if not callable(function):
        raise ValueError(f"{KEY}.{name}={option!r} is a {type(function).__name__}; it must be a function")
    return function  # type: ignore[no-any-return]
