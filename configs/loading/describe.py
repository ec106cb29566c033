"""Description of each configuration key: its table, allowed values, default and docstring.

Everything is read from the schema itself (types through msgspec, docstrings from the source), so it cannot be stale.
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
    """Name without the table."""
    allowed: str
    default: str
    """Default as TOML; "" if there is none."""
    description: str
    """One paragraph, with reStructuredText's double backquotes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table of the file, without the tables inside it."""

    name: str
    """Dotted name; "" for the top of the file."""
    many: bool
    """The table is written as ``[[name]]``, any number of times."""
    description: str
    keys: tuple[Key, ...]


def tables(schema: type[Struct] = Config) -> Iterator[Table]:
    """Yield every table in the order of the schema, each before those inside it."""
    yield from _tables(cast(kinds.StructType, kinds.type_info(schema)), "", many=False)


def _tables(kind: kinds.StructType, name: str, *, many: bool) -> Iterator[Table]:
    descriptions = field_docs(kind.cls)
    inner = {field.name: _struct(field.type) for field in kind.fields}
    keys = tuple(_key(field, descriptions[field.name]) for field in kind.fields if inner[field.name] is None)
    yield Table(name=name, many=many, description=_flat(inspect.getdoc(kind.cls) or ""), keys=keys)
    for field in kind.fields:
        below = inner[field.name]
        if below is not None:
            listed = isinstance(field.type, kinds.ListType)
            yield from _tables(below, f"{name}.{field.name}".lstrip("."), many=listed)


def _struct(kind: kinds.Type) -> kinds.StructType | None:
    item = kind.item_type if isinstance(kind, kinds.ListType) else kind
    if isinstance(item, kinds.UnionType):  # an optional table
        item = next((each for each in item.types if isinstance(each, kinds.StructType)), item)
    return item if isinstance(item, kinds.StructType) else None


def _key(field: kinds.Field, description: str) -> Key:
    return Key(
        name=field.name, allowed=allowed(field.type, brief=True), default=_default(field), description=description
    )


def _default(field: kinds.Field) -> str:
    value: Any = field.default
    if value is NODEFAULT:
        if field.default_factory is NODEFAULT:
            return ""
        value = field.default_factory()
    return value_text(value.value if isinstance(value, Enum) else value)


def field_docs(cls: type[Struct]) -> dict[str, str]:
    """Return the docstring below each field of a struct and its bases, by field name; "" if it has none."""
    sentences: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base is not Struct and issubclass(base, Struct):
            sentences |= {name: text for name, text in _own_docs(base).items() if text or name not in sentences}
    return sentences


def _own_docs(cls: type[Struct]) -> dict[str, str]:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    body = cast(ast.ClassDef, tree).body
    sentences: dict[str, str] = {}
    for node, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            sentences[node.target.id] = _flat(str(text))
    return sentences


def _flat(text: str) -> str:
    """Join the lines of each paragraph; paragraphs stay separate."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))
