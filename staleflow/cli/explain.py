"""``staleflow explain``: the meaning of a configuration key, table or metric."""

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from staleflow.cli import options

if TYPE_CHECKING:
    from staleflow.configs.loading.describe import Key, Table

MAX_COLUMNS = 100


@click.command("explain", short_help="Explain a configuration key or a metric.")
@click.argument("key", default="", shell_complete=options.complete_key)
def command(key: str) -> int:
    """Print the meaning, allowed values and default of KEY. For a table, print each of its keys; for a metric, what it
    measures.

    The last part of a key is enough: every table that has such a key is shown. Without KEY, list the tables.

    \b
    Examples:
      staleflow explain staleness
      staleflow explain rollout.vllm.kv_cache_mb
      staleflow explain max_staleness
      staleflow explain off_policy/max
    """
    from staleflow.configs.loading.describe import tables

    all_tables = list(tables())
    name = key.strip("[]") if key.startswith("[") else key
    lines = _explained(name, all_tables) if name else _overview(all_tables)
    click.echo("\n".join(lines))
    return 0


def _overview(all_tables: "list[Table]") -> Iterator[str]:
    for table in all_tables:
        yield f"{click.style(f'[{table.name}]' if table.name else 'top', bold=True)}"
        yield from _wrapped(table.description.partition("\n\n")[0])


def _explained(name: str, all_tables: "list[Table]") -> Iterator[str]:
    """Yield the lines about a table, a key or a metric. Raise ``ConfigError`` if ``name`` is none of them."""
    from staleflow.metrics.names import METRICS

    if name in METRICS:
        yield f"{click.style(name, bold=True)}  metric; {METRICS[name].unit or 'a number'}"
        yield from _wrapped(METRICS[name].meaning)
        for full, key in _keys_named(name, all_tables):
            yield ""
            yield from _key_lines(key, full)
        return
    for table in all_tables:
        if name == table.name:
            yield click.style(f"[[{name}]]" if table.many else f"[{name}]", bold=True)
            yield from _wrapped(table.description)
            for key in table.keys:
                yield ""
                yield from _key_lines(key, key.name)
            return
        for key in table.keys:
            if name == f"{table.name}.{key.name}".lstrip("."):
                yield from _key_lines(key, name)
                return
    if not (same_name := _keys_named(name, all_tables)):
        _unknown(name)
    for place, (full, key) in enumerate(same_name):
        yield from [""] * bool(place)
        yield from _key_lines(key, full)


def _keys_named(name: str, all_tables: "list[Table]") -> "list[tuple[str, Key]]":
    """Return (dotted name, key) for every key called ``name`` in any table."""
    return [
        (f"{table.name}.{key.name}", key)
        for table in all_tables
        for key in table.keys
        if key.name == name and table.name
    ]


def _key_lines(key: "Key", name: str) -> Iterator[str]:
    default = f"; default {key.default}" if key.default else "; must be set"
    yield f"{click.style(name, bold=True)}  {key.allowed}{default}"
    yield from _wrapped(key.description)


def _wrapped(text: str) -> Iterator[str]:
    """Yield indented lines, wrapped at the terminal's width or ``MAX_COLUMNS``, whichever is smaller."""
    import shutil
    import textwrap

    columns = min(shutil.get_terminal_size().columns, MAX_COLUMNS)
    for place, part in enumerate(text.replace("``", "`").split("\n\n")):
        yield from ([""] if place else [])
        yield from textwrap.wrap(part, columns, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def _unknown(name: str) -> None:
    from staleflow.configs.errors import ConfigError
    from staleflow.configs.loading.explain import nearest
    from staleflow.metrics.names import METRICS

    if "/" in name:
        close = difflib.get_close_matches(name, METRICS, n=1)
        hint = f", did you mean {close[0]}?" if close else ""
        raise ConfigError("KEY", name, f"no such metric{hint}")
    raise ConfigError("KEY", name, nearest(tuple(name.split("."))))
