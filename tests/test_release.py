"""The release works on a bare machine: the tool runs without torch, from the wheel of the source distribution."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.long


def said(*command: object, cwd: Path) -> str:
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_source_distribution_makes_a_wheel_that_runs_without_torch(tmp_path: Path) -> None:
    said(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", ROOT, cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    said(sys.executable, "-m", "venv", tmp_path / "clean", cwd=tmp_path)
    bin_, limits = tmp_path / "clean" / "bin", ROOT / "constraints.txt"
    said(bin_ / "pip", "install", "--quiet", "--constraint", limits, wheel, cwd=tmp_path)
    there = {found["name"] for found in json.loads(said(bin_ / "pip", "list", "--format", "json", cwd=tmp_path))}
    assert there.isdisjoint({"torch", "transformers", "vllm", "matplotlib", "ray", "PyYAML"})
    where = "import pathlib, staleflow.configs as c; print(pathlib.Path(c.__path__[0]) / 'simulated.toml')"
    config = said(bin_ / "python", "-c", where, cwd=tmp_path).strip()
    ended = said(bin_ / "staleflow", "run", config, "trainer.steps=5", "--run-dir", "run", "--json", cwd=tmp_path)
    assert (json.loads(ended)["outcome"], json.loads(ended)["violations"]) == ("finished", 0)
    assert "0 violations" in said(bin_ / "staleflow", "trace", "check", "run", cwd=tmp_path)
