"""The verbs, and what every error looks like: one line on stderr; exit 2 is the operator's mistake, 1 is a failure."""

import importlib
import os
from collections.abc import Sequence

import click

import staleflow
from staleflow.configs.errors import ConfigError
from staleflow.runtime.errors import Refused, Unavailable

VERBS = ("run", "serve", "attach", "status", "trace", "simulate", "plan", "chaos", "keygen", "doctor")
"""In the order of the help; each is ``staleflow.cli.<verb>.command``."""


class Verbs(click.Group):
    """Imports the file of a verb when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(f"staleflow.cli.{cmd_name}").command
        return command


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(staleflow.__version__, message="staleflow %(version)s")
def cli() -> None:
    """Rollout engines, reward workers and a trainer under one staleness bound.

    Start with: staleflow run configs/quickstart.toml
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    try:
        result = cli.main(argv, prog_name="staleflow", standalone_mode=False)
        return int(result or 0)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.ClickException as error:
        return _say(error.format_message(), 2)
    except ConfigError as error:
        return _say(str(error), 2)
    except (Unavailable, Refused) as error:
        return _say(str(error), 1)
    except (KeyboardInterrupt, click.Abort):
        return _say("interrupted", 130)
    except BrokenPipeError:  # whoever read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


def _say(text: str, code: int) -> int:
    click.echo(f"staleflow: {' '.join(text.split())}", err=True)
    return code
