"""The page of every key."""

import re
from collections.abc import Iterator

from docs.generate.made import MADE
from staleflow.configs.loading.describe import Key, Table, tables
from staleflow.configs.section import MOST


def configuration() -> Iterator[str]:
    yield "# Configuration"
    yield ""
    yield MADE
    yield ""
    yield "Every key of a configuration, read off the schema. `staleflow explain KEY` prints the same in a terminal. An"
    yield "unknown key, or a value that is not allowed, is one line that says what is, exit code 2, and nothing is"
    yield f"started. Where no upper limit is named it is {MOST}; strings are printable, of one line. In tables of"
    yield "`options`, which go to your own code, everything may be but dates."
    yield ""
    for table in tables():
        yield from _table(table)


def _table(table: Table) -> Iterator[str]:
    name = table.name or "top of the file"
    yield f"## `[[{name}]]`" if table.many else f"## `[{name}]`" if table.name else f"## {name.capitalize()}"
    yield ""
    yield _said(table.says)
    yield ""
    if not table.keys:
        return
    yield "| key | allowed | default | |"
    yield "|---|---|---|---|"
    for key in table.keys:
        yield _row(key)
    yield ""


def _row(key: Key) -> str:
    default = f"`{key.default}`" if key.default else "must be set"
    allowed = re.sub(r'"([^"]*)"', r'`"\1"`', key.allowed)
    cells = (f"`{key.name}`", allowed, default, _said(key.says).replace("\n\n", " "))
    return f"| {' | '.join(cells)} |"


def _said(text: str) -> str:
    """Docstrings have double backquotes, Markdown single ones."""
    return text.replace("``", "`")
