"""``staleflow explain`` describes a key in the words of the schema."""

import os
import pty
import subprocess
import sys
from contextlib import suppress

import pytest

from tests.cli.conftest import Cli


def test_a_key_is_told_with_what_it_may_be_and_what_it_is(cli: Cli) -> None:
    said = cli("explain", "staleness.max_staleness")
    first, *rest = said.out.splitlines()
    assert (said.code, first) == (0, "staleness.max_staleness  an integer from 0 to 1024; default 2")
    assert " ".join(rest).split()[:4] == ["Maximum", "number", "of", "versions"]
    assert max(map(len, rest)) <= 100


def test_a_key_that_must_be_set_says_so(cli: Cli) -> None:
    assert cli("explain", "stage.run").out.splitlines()[0] == "stage.run  a string; must be set"


def test_a_table_is_told_with_all_of_its_keys(cli: Cli) -> None:
    lines = cli("explain", "[stage]").out.splitlines()
    assert lines[0] == "[[stage]]"
    heads = [line.split()[0] for line in lines if line and not line.startswith((" ", "["))]
    limits = ["workers", "concurrency", "batch", "timeout_s", "retries"]
    assert heads == ["name", "run", "makes", "needs", "options", *limits]


def test_the_last_part_of_a_key_is_enough(cli: Cli) -> None:
    assert cli("explain", "max_staleness").out == cli("explain", "staleness.max_staleness").out
    heads = [line.split()[0] for line in cli("explain", "lr").out.splitlines() if line and not line.startswith(" ")]
    assert heads == ["lr", "critic.lr", "trainer.lr"], "the metric first, then the keys"
    assert cli("explain", "seed").out.splitlines()[0].startswith("seed  an integer")


def test_without_a_key_every_table_is_named(cli: Cli) -> None:
    named = [line for line in cli("explain").out.splitlines() if line.startswith("[")]
    assert named[:4] == ["[model]", "[model.lora]", "[prompts]", "[prompts.sources]"]
    assert "[rollout.vllm]" in named


def test_the_nearest_key_is_offered(cli: Cli) -> None:
    said = cli("explain", "staleness.max_stalenes")
    assert cli("explain", "off_policy/meen").err.endswith("no such metric, did you mean off_policy/mean?\n")
    line = "there is no such key, did you mean staleness.max_staleness?"
    assert (said.code, said.out, said.err) == (2, "", f'staleflow: KEY is "staleness.max_stalenes"; {line}\n')


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("prompts.options.x", "there is no such key; prompts.options is one itself"),
        ("seed.", "there is no such key; seed is one itself"),
        ("stage[0]", "there is no such key, did you mean stage?"),
        ("..", "there is no such key"),
        ("/", "no such metric"),
    ],
)
def test_what_is_below_a_key_or_no_name_at_all_is_no_key(cli: Cli, key: str, said: str) -> None:
    answer = cli("explain", key)
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert answer.err.startswith(f'staleflow: KEY is "{key}"; {said}')


def test_a_metric_is_told_with_its_unit(cli: Cli) -> None:
    lines = cli("explain", "off_policy/max").out.splitlines()
    assert lines == ["off_policy/max  metric; versions", "  largest age of what the step trained"]


@pytest.mark.parametrize(("no_color", "bold"), [("", True), ("1", False)])
def test_on_a_terminal_names_are_bold_unless_colours_are_off(no_color: str, bold: bool) -> None:
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "staleflow.cli", "explain", "seed"]
    subprocess.run(words, stdout=theirs, env=os.environ | {"NO_COLOR": no_color, "TERM": "xterm"}, check=True)
    os.close(theirs)
    said = b""
    with suppress(OSError):  # EIO at the end
        while chunk := os.read(ours, 1 << 16):
            said += chunk
    os.close(ours)
    assert b"Seed of the prompt order" in said
    assert (b"\x1b[1m" in said) == bold
