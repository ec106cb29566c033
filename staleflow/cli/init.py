"""``staleflow init``: write a starter task that runs unchanged."""

import os
import re
import shlex
from pathlib import Path

import click

from staleflow.cli import options
from staleflow.configs.errors import ConfigError

COPIED = ("config.toml", "reward.py")
NAME = "starter"
"""``name`` in the shipped configuration; replaced by the name of the folder."""
LIMIT = 20
"""Exclusive upper bound of the numbers in the shipped problems; equals ``model.options.limit`` of the configuration."""


@click.command("init", short_help="Write a starter configuration, reward and prompts.")
@click.argument("folder", type=options.DIRECTORY, metavar="[DIR]", default=Path("."))
def command(folder: Path) -> int:
    """Write config.toml, reward.py, prompts.jsonl and held_out.jsonl into DIR (default: the current directory).

    The task runs unchanged: a tiny model learns to add, in about a minute on two cores. Then replace the model, the
    prompts and the reward with your own, one at a time. Existing files are never overwritten.

    \b
    Examples:
      staleflow init my-task
      staleflow run my-task/config.toml
    """
    files = _files(folder)
    for path in files:
        if os.path.lexists(path):  # a dangling link counts as existing, too
            raise ConfigError("DIR", str(path), "it exists already and is not overwritten: choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("DIR", str(folder), f"cannot create it: {error.strerror}") from None
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
        click.echo(f"wrote {path}")
    click.echo(f"\nnext:  staleflow run {shlex.quote(str(folder / COPIED[0]))}")
    return 0


def _files(folder: Path) -> dict[Path, str]:
    """Return the content of each file to write, by path."""
    from importlib.resources import files

    shipped = files("staleflow.examples.starter")
    texts = {name: (shipped / name).read_text(encoding="utf-8") for name in COPIED}
    texts["config.toml"] = texts["config.toml"].replace(NAME, _name(folder))
    texts |= {"prompts.jsonl": _rows("prompts"), "held_out.jsonl": _rows("held_out")}
    return {folder / name: text for name, text in texts.items()}


def _name(folder: Path) -> str:
    """Return the folder's name without characters that a run directory may not contain."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-._") or NAME


def _rows(source: str) -> str:
    """Return the quickstart's problems as the text of a JSONL file."""
    import json

    from staleflow.configs.imports import load_object

    rows = load_object(f"staleflow.examples.quickstart.task:{source}")(seed=0, limit=LIMIT)
    return "".join(f"{json.dumps(row)}\n" for row in rows)
