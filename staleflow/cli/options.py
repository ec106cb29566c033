"""Options and arguments that several verbs share, their completion, and checks of their combinations."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click
from click.core import ParameterSource

from staleflow.configs.errors import ConfigError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from staleflow.configs.schema import Config

T = TypeVar("T")


def complete_key(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the dotted configuration keys that start with ``incomplete``."""
    from staleflow.configs.loading.explain import keys

    return [key for key in keys() if key.startswith(incomplete)]


def complete_override(context: click.Context, parameter: click.Parameter, incomplete: str) -> "list[CompletionItem]":
    """Complete ``key=``, or the values that the key accepts.

    bash splits words at ``=``, so the key may arrive as a word of its own before ``incomplete``.
    """
    from click.shell_completion import CompletionItem

    from staleflow.configs.loading.explain import choices

    given = [str(word) for word in context.params.get(parameter.name or "") or ()]
    key_before_equals = given[-2:][0] if given[-1:] == ["="] else given[-1] if given and not incomplete else ""
    if values := choices(key_before_equals):
        return [CompletionItem(value) for value in values if value.startswith(incomplete)]
    key, equals, prefix = incomplete.partition("=")
    if equals:
        return [CompletionItem(f"{key}={value}") for value in choices(key) if value.startswith(prefix)]
    return [CompletionItem(f"{name}=") for name in complete_key(context, parameter, incomplete)]


def complete_run(context: click.Context, parameter: click.Parameter, incomplete: str) -> "list[CompletionItem]":
    """Complete a configuration file first, then overrides."""
    from click.shell_completion import CompletionItem

    if context.params.get("config_file") is None and not context.params.get(parameter.name or ""):
        return [CompletionItem(incomplete, type="file")]
    return complete_override(context, parameter, incomplete)


DIRECTORY = click.Path(path_type=Path)
FILE = click.Path(path_type=Path)

config_file = click.option("--config", "config_file", type=FILE, metavar="FILE", help="Configuration, TOML.")
run_dir = click.option("--run-dir", type=DIRECTORY, metavar="DIR", help="Run directory.")
overrides = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_override)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
INSECURE = ("security.insecure=true",)
insecure = click.option("--insecure", is_flag=True, help="Bind beyond loopback without keys. Any host can connect.")
connect = click.option("--connect", metavar="ADDRESS", help="Address of the scheduler, tcp://... or ipc://...")


def refuse(allowed: str, *names: str) -> None:
    """Raise ``ConfigError`` for the first given option of ``names``; ``allowed`` explains why it has no effect."""
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in names and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            given = context.params[name]
            raise ConfigError(parameter.opts[0], str(given) if isinstance(given, Path) else given, allowed)


def choose_run_dir(run_dir: Path | None, instead: str = "RUN_DIR or --connect ADDRESS") -> Path:
    """Return ``run_dir`` if given, else the newest directory under ``runs/``, whose name is printed to stderr.

    ``instead`` names the arguments that the verb accepts, for the error message.
    """
    from staleflow.supervisor.rundir import RUNS, newest

    if run_dir is not None:
        return run_dir
    if (latest := newest()) is None:
        raise click.UsageError(f"no run given and none found under {RUNS}/: give {instead}")
    click.echo(f"using the newest run: {latest}", err=True)
    return latest


def scheduler_of(run_dir: Path | None, connect: str | None) -> "tuple[Path | None, Config | None, str]":
    """Return the run directory and its configuration, both None with ``connect``, and the scheduler's address.

    ``run_dir`` is the newest one if neither is given. Raise ``UsageError`` if both are.
    """
    from staleflow.configs.loading.load import addresses, read_run

    if run_dir is not None and connect is not None:
        raise click.UsageError("RUN_DIR and --connect exclude each other: give one of them")
    if connect is not None:
        return None, None, connect
    folder = choose_run_dir(run_dir)
    config = read_within(folder, lambda: read_run(folder))
    return folder, config, addresses(config, folder).scheduler


def read_within(run_dir: Path, read: "Callable[[], T]") -> "T":
    """Return ``read()``, which reads files of ``run_dir``. Raise ``ConfigError`` if their file system hangs."""
    from staleflow.process.hung_files import READ_TIMEOUT_S, within

    try:
        return within(READ_TIMEOUT_S, read)
    except TimeoutError:
        allowed = f"its file system did not respond within {READ_TIMEOUT_S:g} s; --connect ADDRESS needs no files"
        raise ConfigError("RUN_DIR", str(run_dir), allowed) from None


def run_config(
    config_file: Path | None, overrides: Sequence[str], run_dir: Path, check: "Callable[[Config], None] | None" = None
) -> "Config":
    """Return the configuration of a run directory; the first process, started with ``--config``, creates it.

    A run directory never changes its configuration, so nothing is written unless all checks pass, including ``check``.
    """
    from staleflow.configs.loading.load import load, read_run
    from staleflow.supervisor.rundir import check_owner, check_same, create

    check_owner(run_dir)
    if config_file is None:
        if overrides:
            raise ConfigError("override", overrides[0], "a run directory keeps its configuration: add --config")
        return read_run(run_dir)
    config = load(config_file, overrides)
    if check is not None:
        check(config)
    if (run_dir / "config.json").is_file():
        check_same(config, run_dir)
    else:
        create(config, run_dir)
    return config
