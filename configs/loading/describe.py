"""What each key of a configuration is: its table, what is allowed, its default, and what the schema says of it.

Read off the schema itself (types by msgspec, sentences from the source), so that nothing told of a key can be stale.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import msgspec.inspect as kinds
from msgspec import NODEFAULT, Struct

from staleflow.configs.loading.explain import allowed
from staleflow.configs.loading.toml import value_text
from staleflow.configs.schema import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key."""

    name: str
    """Without its table."""
    allowed: str
    default: str
    """As TOML; empty where there is none."""
    says: str
    """One paragraph, in reStructuredText's double backquotes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table of the file, without those below it."""

    name: str
    """Dotted; empty for the top of the file."""
    many: bool
    """Written as ``[[name]]``, as often as needed."""
    says: str
    keys: tuple[Key, ...]


def tables() -> Iterator[Table]:
    """Every table in the order of the schema, each before those inside it."""
    yield from _tables(cast(kinds.StructType, kinds.type_info(Config)), "", many=False)


def _tables(kind: kinds.StructType, name: str, *, many: bool) -> Iterator[Table]:
    said = _sentences(kind.cls)
    inner = {field.name: _struct(field.type) for field in kind.fields}
    keys = tuple(_key(field, said[field.name]) for field in kind.fields if inner[field.name] is None)
    yield Table(name=name, many=many, says=_flat(inspect.getdoc(kind.cls) or ""), keys=keys)
    for field in kind.fields:
        below = inner[field.name]
        if below is not None:
            listed = isinstance(field.type, kinds.ListType)
            yield from _tables(below, f"{name}.{field.name}".lstrip("."), many=listed)


def _struct(kind: kinds.Type) -> kinds.StructType | None:
    item = kind.item_type if isinstance(kind, kinds.ListType) else kind
    return item if isinstance(item, kinds.StructType) else None


def _key(field: kinds.Field, says: str) -> Key:
    return Key(name=field.name, allowed=allowed(field.type, brief=True), default=_default(field), says=says)


def _default(field: kinds.Field) -> str:
    value: Any = field.default
    if value is NODEFAULT:
        if field.default_factory is NODEFAULT:
            return ""
        value = field.default_factory()
    return value_text(value.value if isinstance(value, Enum) else value)


def _sentences(cls: type[Struct]) -> dict[str, str]:
    """The docstring below each field, by name; empty where there is none."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    body = cast(ast.ClassDef, tree).body
    found: dict[str, str] = {}
    for node, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            found[node.target.id] = _flat(str(text))
    return found


def _flat(text: str) -> str:
    """Lines of a paragraph joined; paragraphs stay apart."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))
