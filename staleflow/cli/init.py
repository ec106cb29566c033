"""``staleflow init``: a task to begin from, which runs as it is."""

import os
import re
import shlex
from pathlib import Path

import click

from staleflow.cli import options
from staleflow.configs.errors import ConfigError

COPIED = ("config.toml", "reward.py")
NAME = "starter"
"""Of the shipped configuration; the folder's own takes its place."""
LIMIT = 20
"""Numbers of the shipped task's problems are below it, as ``model.options.limit`` of the configuration says."""


@click.command("init", short_help="Write a configuration, a reward and prompts to begin from.")
@click.argument("folder", type=options.DIRECTORY, metavar="[DIR]", default=Path("."))
def command(folder: Path) -> int:
    """Write config.toml, reward.py, prompts.jsonl and held_out.jsonl into DIR (default: here).

    They run as they are: a tiny model learns to add, in about a minute on two cores. Then put your model, your prompts
    and your reward in their place, one at a time. Nothing is ever overwritten.

    \b
    Examples:
      staleflow init my-task
      staleflow run my-task/config.toml
    """
    files = _files(folder)
    for path in files:
        if os.path.lexists(path):  # a link, too: what it points to is not here
            raise ConfigError("DIR", str(path), "it is there already and left alone: choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("DIR", str(folder), f"it cannot be made: {error.strerror}") from None
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
        click.echo(f"wrote {path}")
    click.echo(f"\nnext:  staleflow run {shlex.quote(str(folder / COPIED[0]))}")
    return 0


def _files(folder: Path) -> dict[Path, str]:
    """What is to be written, by path."""
    from importlib.resources import files

    shipped = files("staleflow.examples.starter")
    texts = {name: (shipped / name).read_text(encoding="utf-8") for name in COPIED}
    texts["config.toml"] = texts["config.toml"].replace(NAME, _name(folder))
    texts |= {"prompts.jsonl": _rows("prompts"), "held_out.jsonl": _rows("held_out")}
    return {folder / name: text for name, text in texts.items()}


def _name(folder: Path) -> str:
    """The folder's name, as far as it may name run directories."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-._") or NAME


def _rows(source: str) -> str:
    """A JSONL file of the quickstart's problems."""
    import json

    from staleflow.configs.loading.imports import load_object

    rows = load_object(f"staleflow.examples.quickstart.task:{source}")(seed=0, limit=LIMIT)
    return "".join(f"{json.dumps(row)}\n" for row in rows)
