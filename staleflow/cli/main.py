"""The ``staleflow`` command: its verbs, lazy loading, and the mapping of exceptions to messages and exit codes.

Every error is one line on stderr. Exit code 2 means a mistake in the command line or configuration; 1 means a failure.
"""

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
    "Start and stop": ("init", "run", "drain"),
    "Single processes and several machines": ("serve", "attach", "launch", "keygen"),
    "Observe": ("status", "top", "trace", "report", "eval", "weights"),
    "Plan": ("simulate", "plan"),
    "Diagnose": ("doctor", "explain", "chaos", "completion"),
}
VERBS = tuple(verb for verbs in SECTIONS.values() for verb in verbs)
"""Verbs in the order of ``--help``; each one is implemented by ``staleflow.cli.<verb>.command``."""
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


class Verbs(click.Group):
    """Command group that imports the module of a verb on first use, which keeps start-up fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, verbs in SECTIONS.items():
            commands = ((verb, self.get_command(ctx, verb)) for verb in verbs)
            rows = [(verb, command.get_short_help_str(90)) for verb, command in commands if command is not None]
            with formatter.section(title):
                formatter.write_dl([(verb.ljust(max(map(len, VERBS))), summary) for verb, summary in rows])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in VERBS and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], VERBS, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"valid commands are {', '.join(VERBS)}"
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
    """Run rollout engines, reward workers and a trainer under one staleness bound.

    Start with: staleflow init my-task, or staleflow run configs/quickstart.toml
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # print "?" for characters that a non-UTF-8 terminal cannot encode
            stream.reconfigure(errors="replace")
    code = _run(argv)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:  # closed terminal: otherwise Python reports it at exit and overrides the exit code
            if error.errno in DISK_FULL_ERRNOS:
                code = code or _fail(f"output to {stream.name} is incomplete: {error.strerror}", 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code


def _run(argv: Sequence[str] | None) -> int:
    try:
        colours = False if os.environ.get("NO_COLOR") else None  # None: click detects whether the terminal has colours
        result = cli.main(argv, prog_name="staleflow", standalone_mode=False, color=colours)
        return int(result or 0)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.ClickException as error:
        return _fail(error.format_message(), 2)
    except ConfigError as error:
        return _fail(str(error), 2)
    except Unavailable as error:
        hint = "" if error.why else "; check the address, whether the run is active, and STALEFLOW_KEY"
        return _fail(f"{error}{hint}", 1)
    except Refused as error:
        return _fail(str(error), 1)
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted", 130)
    except BrokenPipeError:  # the reader of our output has exited, for example `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except OSError as error:  # a path that cannot be read or written
        if error.errno in DISK_FULL_ERRNOS and error.filename is None:
            return _fail(f"cannot write the output: {error.strerror}", 1)
        if error.filename is None or error.strerror is None:
            raise
        return _fail(f"{os.fsdecode(error.filename)}: {error.strerror}", 2)


def _fail(text: str, code: int) -> int:
    click.echo(f"staleflow: {printable(' '.join(text.split()))}", err=True)
    return code
