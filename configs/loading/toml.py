"""Writer of plain values as TOML; the standard library has only a reader."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast


def dumps(table: Mapping[str, Any]) -> str:
    """Return ``table`` as a TOML document, its values before its tables."""
    return "\n".join(_lines(table, ())) + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    for key, value in table.items():
        if not isinstance(value, dict):
            yield f"{_key(key)} = {value_text(value)}"
    for key, value in table.items():
        if isinstance(value, dict):
            inner = (*path, key)
            yield ""
            yield f"[{'.'.join(map(_key, inner))}]"
            yield from _lines(cast(dict[str, Any], value), inner)


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "a").replace("-", "a").isalnum()
    return key if bare else _string(key)


def value_text(value: object) -> str:
    """Return one value in TOML syntax."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return _string(value)
        case list() | tuple():
            return f"[{', '.join(value_text(item) for item in cast(list[object], value))}]"
        case dict():
            pairs = cast(dict[str, object], value).items()
            return f"{{{', '.join(f'{_key(key)} = {value_text(item)}' for key, item in pairs)}}}"
        case _:
            return repr(value)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
