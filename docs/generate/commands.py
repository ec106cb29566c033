"""The command reference: one section for each verb."""

import inspect
import re
from collections.abc import Iterator

import click

from docs.generate.made import MADE
from staleflow.cli.main import cli


def commands() -> Iterator[str]:
    yield "# Commands"
    yield ""
    yield MADE
    yield ""
    yield "All commands of `staleflow`, with the text of `--help`. Exit codes: 0 success, 1 failure, 2 invalid"
    yield "arguments or configuration (nothing was started), 130 interrupted. `NO_COLOR=1` disables colours; they are"
    yield "also disabled when the output is not a terminal."
    yield ""
    context = click.Context(cli, info_name="staleflow")
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        yield from _command(command, click.Context(command, info_name=name, parent=context))


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    yield f"## {context.command_path}"
    yield ""
    yield from _usage(command, context)
    about, _, examples = inspect.cleandoc(command.help or "").partition("\b\nExamples:")
    yield from (f"{' '.join(part.split())}\n" for part in about.split("\n\n") if part.strip())
    if examples:
        yield "```sh"
        yield from (re.sub(r"\s{2,}", "  # ", line.strip()) for line in examples.splitlines() if line.strip())
        yield "```"
        yield ""
    yield from _options(command, context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _command(inner, click.Context(inner, info_name=name, parent=context))


def _usage(command: click.Command, context: click.Context) -> Iterator[str]:
    if not isinstance(command, click.Group):
        yield "```text"
        yield f"{context.command_path} {' '.join(command.collect_usage_pieces(context))}"
        yield "```"
        yield ""


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    records = [parameter.get_help_record(context) for parameter in command.get_params(context)]
    shown = [record for record in records if record is not None and record[1] and "--help" not in record[0]]
    if not shown:
        return
    yield "| option | |"
    yield "|---|---|"
    for names, text in shown:
        yield f"| `{names}` | {text} |"
    yield ""
