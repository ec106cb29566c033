"""Decoding errors in one line that names the key, its value and the allowed values.

The decoder reports the place of the error; the allowed values come from the schema itself.
"""

import datetime
import difflib
import math
import re
from collections.abc import Iterator
from typing import Any, NoReturn, cast

import msgspec
import msgspec.inspect as kinds

from staleflow.configs.errors import MISSING, TABLE, ConfigError
from staleflow.configs.schema import Config
from staleflow.configs.section import MOST

_PATH = re.compile(r" - at `\$\.?(.*)`$")
_ITEM = re.compile(r"\[[^\]]*\]")
_NAMED = re.compile(r"(unknown|missing required) field `([^`]*)`")
_BIGGEST = 2**63 - 1
_SURROGATE = re.compile(r"[\ud800-\udfff]")
"""Characters that Python substitutes for command-line bytes that are not UTF-8."""


def decode(table: dict[str, Any]) -> Config:
    """Return the configuration that ``table`` describes. Raises ``ConfigError``."""
    _usable(table, ())
    try:
        return msgspec.convert(table, Config)
    except msgspec.ValidationError as error:
        _explain(str(error), table)


def _explain(message: str, table: dict[str, Any]) -> NoReturn:
    at = _PATH.search(message)
    path = tuple(part for part in (at[1] if at else "").replace("[...]", "").split(".") if part)
    if named := _NAMED.search(message):
        path = (*path, named[2])
        if named[1] == "unknown":
            value = _value(table, path)
            raise ConfigError(".".join(path), TABLE if isinstance(value, dict) else value, nearest(path))
        raise ConfigError(".".join(path), MISSING, f"it must be {allowed(_kind(path))}")
    path = (*path[:-1], _ITEM.sub("", path[-1])) if path else path
    raise ConfigError(".".join(path), _value(table, path), f"it must be {allowed(_kind(path))}")


def _value(table: Any, path: tuple[str, ...]) -> object:
    for part in path:
        name = _ITEM.sub("", part)
        if not isinstance(table, dict) or name not in table:
            return MISSING
        table = cast(dict[str, Any], table)[name]
        for place in _ITEM.findall(part):
            table = table[int(place[1:-1])]
    return table


def keys(kind: kinds.Type | None = None, above: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield every dotted key of the schema that has a value, in order."""
    for field in cast(kinds.StructType, kind or kinds.type_info(Config)).fields:
        path = (*above, field.name)
        inner = field.type.item_type if isinstance(field.type, kinds.ListType) else field.type
        if isinstance(inner, kinds.StructType):
            yield from keys(inner, path)
        else:
            yield ".".join(path)


def choices(key: str) -> tuple[str, ...]:
    """Return the values of a key that has only a few, as an override writes them; empty for other or unknown keys."""
    match _kind(tuple(key.split("."))) if key in keys() else None:
        case kinds.LiteralType() as kind:
            return tuple(sorted(str(value) for value in kind.values))
        case kinds.EnumType() as kind:
            return tuple(sorted(str(member.value) for member in kind.cls))
        case kinds.BoolType():
            return ("false", "true")
        case kinds.UnionType() as kind:  # of true, false and names
            return (
                "false",
                *sorted(str(v) for t in kind.types if isinstance(t, kinds.LiteralType) for v in t.values),
                "true",
            )
        case _:
            return ()


def nearest(path: tuple[str, ...]) -> str:
    """Return the message for a key that does not exist."""
    *above, wrong = (_ITEM.sub("", part) for part in path)
    all_keys = [key.split(".") for key in keys()]
    if above in all_keys:
        return f"there is no such key; {'.'.join(above)} is one itself"
    siblings = {key[len(above)]: ".".join(key[: len(path)]) for key in all_keys if key[: len(above)] == above}
    leaves = {key[-1]: ".".join(key) for key in reversed(all_keys)}
    # A key of the same section is more likely meant than a closer match in another section.
    for names in (siblings, leaves) if above else ({**leaves, **siblings},):
        if close := difflib.get_close_matches(wrong, names, n=1, cutoff=0.65):
            return f"there is no such key, did you mean {names[close[0]]}?"
    return f"there is no such key; allowed here: {', '.join(siblings)}" if siblings else "there is no such key"


def _kind(path: tuple[str, ...]) -> kinds.Type:
    kind: kinds.Type = kinds.type_info(Config)
    for part in path:
        if isinstance(kind, kinds.ListType):
            kind = kind.item_type
        match kind:
            case kinds.StructType():
                kind = next(field.type for field in kind.fields if field.name == _ITEM.sub("", part))
            case kinds.DictType():
                kind = kind.value_type
            case _:
                break
    return kind


def allowed(kind: kinds.Type, *, brief: bool = False) -> str:
    """Describe the values of this type in words. ``brief`` omits the limits that hold for every number and string."""
    match kind:
        case kinds.IntType():
            return f"an integer{_range(kind, brief=brief)}"
        case kinds.FloatType():
            return f"a number{_range(kind, brief=brief)}"
        case kinds.StrType():
            return "a string" if kind.pattern is None or brief else "a printable string"
        case kinds.BoolType():
            return "true or false"
        case kinds.LiteralType():
            return _one_of(kind.values)
        case kinds.UnionType():
            return " or ".join(allowed(each, brief=brief) for each in kind.types)
        case kinds.EnumType():
            return _one_of(tuple(member.value for member in kind.cls))
        case kinds.ListType():
            return f"a list, each {allowed(kind.item_type, brief=brief)}"
        case kinds.TupleType():
            return f"a list of {len(kind.item_types)}, each {allowed(kind.item_types[0])}"
        case kinds.DictType():
            return "a table" if isinstance(kind.value_type, kinds.AnyType) else "a table of strings"
        case kinds.StructType():
            return f"a table with {', '.join(field.name for field in kind.fields)}"
        case _:
            return "a TOML value"


def _one_of(values: tuple[Any, ...]) -> str:
    return f"one of {', '.join(repr(str(value)) for value in sorted(values))}".replace("'", '"')


def _range(kind: kinds.IntType | kinds.FloatType, *, brief: bool) -> str:
    most = None if brief and kind.le == MOST else kind.le
    if kind.ge is not None and most is not None:
        return f" from {kind.ge} to {most}"
    signs = ((">=", kind.ge), (">", kind.gt), ("<=", most), ("<", kind.lt))
    return " and".join(f" {sign} {limit}" for sign, limit in signs if limit is not None)


def _usable(value: object, path: tuple[str, ...]) -> None:
    """Raise ``ConfigError`` for values that TOML can express but later stages cannot use.

    These are infinities, NaN, integers beyond 64 bits, dates (a run's own file would return them as strings), and text
    that no file can store.
    """
    match value:
        case dict():
            for key, inner in cast(dict[str, object], value).items():
                _usable(key, path)
                _usable(inner, (*path, key))
        case list():
            for inner in cast(list[object], value):
                _usable(inner, path)
        case float() if not math.isfinite(value):
            raise ConfigError(".".join(path), value, "it must be a finite number")
        case int() if abs(value) > _BIGGEST:
            raise ConfigError(".".join(path), value, "it must be an integer of at most 64 bits")
        case datetime.date() | datetime.time():
            raise ConfigError(".".join(path), value, f'it must be no date and no time: write the string "{value}"')
        case str() if _SURROGATE.search(value):
            raise ConfigError(".".join(path), value, "it must be text: UTF-8 cannot write it")
        case _:
            pass
