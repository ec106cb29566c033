"""Shell completion returns the right words, requested the way the shells request it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from staleflow.cli.completion import SHELLS, VARIABLE
from staleflow.cli.main import cli as command_line
from tests.cli.conftest import Cli

BIN = Path(sys.executable).parent
ASK = """
source {script}
COMP_WORDS=({words})
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
compopt() {{ :; }}
_staleflow_completion_keys staleflow
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_takes_its_script(cli: Cli, short_dir: Path, shell: str) -> None:
    said = cli("completion", shell)
    assert (said.code, said.err) == (0, "")
    assert "_STALEFLOW_COMPLETE" in said.out
    if shutil.which(shell):
        (short_dir / "script").write_text(said.out)
        subprocess.run([shell, "-n", str(short_dir / "script")], check=True)


def offered(cli: Cli, short_dir: Path, words: str) -> list[str]:
    (short_dir / "script").write_text(cli("completion", "bash").out)
    ask = ASK.format(script=short_dir / "script", words=words)
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", ask], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("staleflow run a.toml staleness.b", ["staleness.bound="]),
        ("staleflow run a.toml seed=1 rollout.on_update = r", ["recompute"]),
    ],
)
def test_bash_completes_a_key_and_its_values(cli: Cli, short_dir: Path, words: str, found: list[str]) -> None:
    assert offered(cli, short_dir, words) == found


@pytest.mark.parametrize(
    ("words", "incomplete", "found"),
    [
        ("", "pl", ["plan"]),
        ("trace", "ch", ["check"]),
        ("doctor", "--conf", ["--config"]),
        ("run a.toml", "staleness.bo", ["staleness.bound="]),
        ("run a.toml", "staleness.bound=to", ["staleness.bound=token"]),
        ("run a.toml staleness.bound", "=", ["token", "trajectory"]),
        ("run a.toml staleness.bound =", "to", ["token"]),
        ("run a.toml trainer.streaming", "=", ["false", "true"]),
        ("explain", "staleness.on", ["staleness.on_overdue"]),
        ("simulate a.toml", "rollout.max_inflight=", []),
    ],
)
def test_words_are_completed(words: str, incomplete: str, found: list[str]) -> None:
    shell = ShellComplete(command_line, {}, "staleflow", VARIABLE)
    assert [item.value for item in shell.get_completions(words.split(), incomplete)] == found
