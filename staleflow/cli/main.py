"""The verbs, and what every error looks like: one line on stderr; exit 2 is the operator's mistake, 1 is a failure."""

import difflib
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence

import click

import staleflow
from staleflow.configs.errors import ConfigError
from staleflow.net.errors import Refused, Unavailable
from staleflow.process.sanitize import printable

SECTIONS = {
    "Begin and end": ("init", "run", "drain"),
    "By hand, and on several machines": ("serve", "attach", "launch", "keygen"),
    "Look": ("status", "top", "trace", "report"),
    "Ahead of time": ("simulate", "plan"),
    "Find out": ("doctor", "explain", "chaos", "completion"),
}
VERBS = tuple(verb for verbs in SECTIONS.values() for verb in verbs)
"""In the order of the help; each is ``staleflow.cli.<verb>.command``."""
FULL = (errno.ENOSPC, errno.EDQUOT)


class Verbs(click.Group):
    """Imports the file of a verb when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, verbs in SECTIONS.items():
            commands = ((verb, self.get_command(ctx, verb)) for verb in verbs)
            rows = [(verb, command.get_short_help_str(90)) for verb, command in commands if command is not None]
            with formatter.section(title):
                formatter.write_dl([(verb.ljust(max(map(len, VERBS))), says) for verb, says in rows])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in VERBS and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], VERBS, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"there are {', '.join(VERBS)}"
            ctx.fail(f"No such command '{args[0]}': {hint}")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(f"staleflow.cli.{cmd_name}").command
        return command


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(staleflow.__version__, message="staleflow %(version)s")
def cli() -> None:
    """Rollout engines, reward workers and a trainer under one staleness bound.

    Start with: staleflow init my-task, or staleflow run configs/quickstart.toml
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # of another encoding than UTF-8: a letter that it lacks is a ?
            stream.reconfigure(errors="replace")
    code = _run(argv)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:  # a terminal that is gone: Python would say so itself, with an exit code of its own
            if error.errno in FULL:
                code = code or _say(f"{stream.name} is not whole: {error.strerror}", 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code


def _run(argv: Sequence[str] | None) -> int:
    try:
        colours = False if os.environ.get("NO_COLOR") else None  # None: as the terminal has them
        result = cli.main(argv, prog_name="staleflow", standalone_mode=False, color=colours)
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
    except OSError as error:  # a path that cannot be written, or read
        if error.errno in FULL and error.filename is None:
            return _say(f"what is printed here found no room: {error.strerror}", 1)
        if error.filename is None or error.strerror is None:
            raise
        return _say(f"{os.fsdecode(error.filename)}: {error.strerror}", 2)


def _say(text: str, code: int) -> int:
    click.echo(f"staleflow: {printable(' '.join(text.split()))}", err=True)
    return code
