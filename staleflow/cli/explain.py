"""``staleflow explain``: what a key of a configuration means."""

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from staleflow.cli import options

if TYPE_CHECKING:
    from staleflow.configs.loading.describe import Key, Table

MAX_COLUMNS = 100


@click.command("explain", short_help="Say what a key of a configuration, or a metric, means.")
@click.argument("key", default="", shell_complete=options.complete_key)
def command(key: str) -> int:
    """Print what KEY means, what it may be and what it is if nobody sets it; of a table, every key in it; of a metric,
    what it measures.

    A key's own name will do: of several tables that have it, each. Without KEY: the tables there are.

    \b
    Examples:
      staleflow explain staleness
      staleflow explain rollout.vllm.kv_cache_mb
      staleflow explain max_staleness
      staleflow explain off_policy/max
    """
    from staleflow.configs.loading.describe import tables

    found = list(tables())
    name = key.strip("[]") if key.startswith("[") else key
    lines = _of(name, found) if name else _overview(found)
    click.echo("\n".join(lines))
    return 0


def _overview(found: "list[Table]") -> Iterator[str]:
    for table in found:
        yield f"{click.style(f'[{table.name}]' if table.name else 'top', bold=True)}"
        yield from _wrapped(table.description.partition("\n\n")[0])


def _of(name: str, found: "list[Table]") -> Iterator[str]:
    """The lines about a table, a key or a metric; ``ConfigError`` when it is none of them."""
    from staleflow.metrics.names import METRICS

    if name in METRICS:
        yield f"{click.style(name, bold=True)}  metric; {METRICS[name].unit or 'a number'}"
        yield from _wrapped(METRICS[name].meaning)
        for full, key in _ending(name, found):
            yield ""
            yield from _about(key, full)
        return
    for table in found:
        if name == table.name:
            yield click.style(f"[[{name}]]" if table.many else f"[{name}]", bold=True)
            yield from _wrapped(table.description)
            for key in table.keys:
                yield ""
                yield from _about(key, key.name)
            return
        for key in table.keys:
            if name == f"{table.name}.{key.name}".lstrip("."):
                yield from _about(key, name)
                return
    if not (ending := _ending(name, found)):
        _unknown(name)
    for place, (full, key) in enumerate(ending):
        yield from [""] * bool(place)
        yield from _about(key, full)


def _ending(name: str, found: "list[Table]") -> "list[tuple[str, Key]]":
    """The keys that are called so in their tables, by their whole names."""
    return [
        (f"{table.name}.{key.name}", key) for table in found for key in table.keys if key.name == name and table.name
    ]


def _about(key: "Key", name: str) -> Iterator[str]:
    default = f"; default {key.default}" if key.default else "; must be set"
    yield f"{click.style(name, bold=True)}  {key.allowed}{default}"
    yield from _wrapped(key.description)


def _wrapped(text: str) -> Iterator[str]:
    """Below its heading; as wide as the terminal, within reason."""
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
        raise ConfigError("KEY", name, f"there is no such metric{hint}")
    raise ConfigError("KEY", name, nearest(tuple(name.split("."))))
