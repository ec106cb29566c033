"""Options that several verbs share, and what they mean together."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from staleflow.configs.errors import ConfigError

if TYPE_CHECKING:
    from staleflow.configs.schema import Config

DIRECTORY = click.Path(path_type=Path)
FILE = click.Path(path_type=Path)

config_file = click.option("--config", "config_file", type=FILE, metavar="FILE", help="Configuration, TOML.")
run_dir = click.option("--run-dir", type=DIRECTORY, metavar="DIR", help="Run directory.")
overrides = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
INSECURE = ("security.insecure=true",)
insecure = click.option("--insecure", is_flag=True, help="Bind beyond loopback without keys. Anybody may come in.")
connect = click.option("--connect", metavar="ADDRESS", help="Address of the scheduler, tcp://... or ipc://...")


def run_config(
    config_file: Path | None, overrides: Sequence[str], run_dir: Path, check: "Callable[[Config], None] | None" = None
) -> "Config":
    """The configuration of a run directory, which a first process with ``--config`` fills.

    Nothing is written unless everything fits, ``check`` too: a run directory never changes its configuration.
    """
    from staleflow.configs.load import load, read_run
    from staleflow.supervisor.rundir import first, same

    if config_file is None:
        if overrides:
            raise ConfigError("override", overrides[0], "it needs --config: a run directory keeps its own")
        return read_run(run_dir)
    config = load(config_file, overrides)
    if check is not None:
        check(config)
    if (run_dir / "config.json").is_file():
        same(config, run_dir)
    else:
        first(config, run_dir)
    return config
