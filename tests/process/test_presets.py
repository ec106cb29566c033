"""Every preset trains in the smallest run with a model, under the other system's rule and this project's bound."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from staleflow.configs.presets import NAMES

SMOKE = Path(__file__).parent.parent.parent / "configs" / "smoke.toml"


@pytest.mark.long
@pytest.mark.xdist_group("machine")
@pytest.mark.parametrize("name", NAMES)
def test_a_preset_trains_and_keeps_its_bound(name: str, short_dir: Path) -> None:
    words = ("run", str(SMOKE), f"preset={name}", "--run-dir", str(short_dir / "run"), "--json")
    done = subprocess.run([sys.executable, "-m", "staleflow.cli", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["outcome"], summary["steps"], summary["violations"]) == ("finished", 8, 0)
