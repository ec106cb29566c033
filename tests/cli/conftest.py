"""Run the command line in a process of its own, in an empty folder."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SIMULATED = ROOT / "configs" / "simulated.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """Result of a command that has exited."""

    code: int
    out: str
    err: str
    left: list[str]
    """Names of the entries in the working folder after the command."""


Cli = Callable[..., Said]


@pytest.fixture
def fonts(cache: Path) -> None:
    """Build matplotlib's list of fonts: a command that takes long over it says so on stderr."""
    subprocess.run([sys.executable, "-c", "import matplotlib.font_manager"], check=True)


@pytest.fixture
def cli(short_dir: Path) -> Cli:
    """Run ``staleflow`` with these arguments."""

    def run(*words: object, timeout_s: float = 120.0) -> Said:
        command = [sys.executable, "-m", "staleflow.cli", *map(str, words)]
        done = subprocess.run(command, cwd=short_dir, capture_output=True, text=True, timeout=timeout_s, check=False)
        left = sorted(path.name for path in short_dir.iterdir())
        return Said(code=done.returncode, out=done.stdout, err=done.stderr, left=left)

    return run
