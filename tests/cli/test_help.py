"""The command line imports little until a verb runs, and its names are stable."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from staleflow.cli.main import VERBS, cli

HEAVY = ("torch", "transformers", "numpy", "rich", "zmq", "lmdb", "msgspec")
CODE = """
import sys
from staleflow.cli import main
code = main({!r})
print(*sys.modules, file=sys.stderr)
sys.exit(code)
"""


def imported(*arguments: str) -> tuple[str, set[str]]:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(list(arguments))], capture_output=True, text=True, check=True
    )
    return done.stdout, set(done.stderr.split())


def test_help_imports_nothing_heavy() -> None:
    text, modules = imported("--help")
    told = [line.split()[0] for line in text.partition("Start and stop:")[2].splitlines() if line.startswith("  ")]
    assert told == list(VERBS)
    assert modules.isdisjoint(HEAVY)


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_imports_nothing_heavy(verb: str) -> None:
    text, modules = imported(verb, "--help")
    assert f"staleflow {verb}" in text
    assert modules.isdisjoint(HEAVY)


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_names_what_it_takes_and_is_not_cut(verb: str) -> None:
    text = CliRunner().invoke(cli, [verb, "--help"]).output
    assert not any(words in text for words in ("FLOAT", "INTEGER", "RANGE"))
    assert not [line for line in text.partition("Commands:")[2].splitlines() if line.endswith("...")]


def test_the_version_is_printed() -> None:
    assert imported("--version")[0].startswith("staleflow ")


def test_the_names_of_the_verbs_are_frozen() -> None:
    assert sorted(VERBS) == [
        *("attach", "chaos", "completion", "doctor", "drain", "eval", "explain", "init", "keygen", "launch", "plan"),
        *("report", "run", "serve", "simulate", "status", "top", "trace", "weights"),
    ]
