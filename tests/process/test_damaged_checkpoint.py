"""A stopped run with a damaged newest checkpoint resumes from the previous one; it refuses to start if none is left."""

import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.process.running import END_S, Run, audited

pytestmark = pytest.mark.xdist_group("machine")

SMOKE = ("trainer.steps=1000", "trainer.checkpoint_every=3", "trainer.eval_prompts=0", "rollout.workers=1")


def checkpoints(run_dir: Path) -> list[int]:
    return sorted(int(path.name) for path in (run_dir / "checkpoints").iterdir() if path.name.isdecimal())


def flip(file: Path) -> None:
    """Change one byte in the middle of the file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)


@pytest.fixture(scope="module")
def stopped() -> Iterator[Path]:
    """Run directory of a run that was killed when the initial model was no longer one of its last two checkpoints."""
    parent = Path(tempfile.mkdtemp(prefix="sf-"))
    with Run(parent / "run", "smoke.toml", *SMOKE) as run:
        run.wait_for("checkpoint", 3, END_S)
        run.process.send_signal(signal.SIGSTOP)  # it restarts none of them
        family = run.family()
        for process in (*family, run.process):
            process.send_signal(signal.SIGKILL)
        psutil.wait_procs(family, timeout=120)
    yield parent / "run"
    shutil.rmtree(parent, ignore_errors=True)


@pytest.fixture
def run_dir(stopped: Path, run_dir: Path) -> Path:
    """A copy of the stopped run."""
    shutil.copytree(stopped, run_dir, symlinks=True, ignore=shutil.ignore_patterns("sock"))
    return run_dir


def digests(run: Run) -> dict[int, set[str]]:
    """Digests of the batches sealed for each step, in every lineage."""
    found: dict[int, set[str]] = {}
    for event in run.events():
        if event["ev"] == "seal":
            found.setdefault(event["step"], set()).add(event["digest"])
    return found


def rollbacks(run: Run) -> list[dict[str, Any]]:
    return [event for event in run.events() if event["ev"] == "rollback"]


def test_a_run_whose_newest_checkpoint_is_damaged_resumes_from_the_one_before_to_its_end(run_dir: Path) -> None:
    older, newest = checkpoints(run_dir)[-2:]
    steps = newest + 9
    flip(run_dir / "checkpoints" / str(newest) / "model.safetensors")
    with Run(run_dir, "smoke.toml", *SMOKE, f"trainer.steps={steps}", "--resume") as run:
        output = run.finish(END_S)
    assert run.process.returncode == 0, output
    assert run.summary()["steps"] == steps
    assert run.summary()["restarts"] == {}
    assert [event["to_version"] for event in rollbacks(run)] == [older]
    assert len(digests(run)[older]) == 1, "the batch after the checkpoint was sealed again as it was"
    audited(run_dir, "open=2", "rollback=1", f"consume={steps}")
    (aside,) = (run_dir / "checkpoints").glob(f"{newest}.*.damaged")
    log = (run_dir / "logs" / "trainer.log").read_text()
    assert f"checkpoint {newest} is damaged (model.safetensors does not match its checksum)" in log
    assert str(aside) in log
    assert checkpoints(run_dir) == [steps - 3, steps]


def test_a_run_without_a_whole_checkpoint_refuses_at_once_and_names_weights_that_can_be_read(run_dir: Path) -> None:
    *older, newest = checkpoints(run_dir)
    for version in older:
        shutil.rmtree(run_dir / "checkpoints" / str(version))
    flip(run_dir / "checkpoints" / str(newest) / "optimizer/rank-0-file-0.safetensors")
    before = sorted((run_dir / "checkpoints").rglob("*"))
    with Run(run_dir, "smoke.toml", *SMOKE, "--resume") as run:
        output = run.finish(END_S)
    assert run.process.returncode == 2, output
    (line,) = [line for line in output.splitlines() if "the run failed: trainer rejected its configuration" in line]
    assert f"start a new run with model.path={run_dir}/checkpoints/{newest} " in line
    assert f"{newest} is damaged (optimizer/rank-0-file-0.safetensors does not match its checksum)" in line
    assert run.summary()["restarts"] == {}
    assert sorted((run_dir / "checkpoints").rglob("*")) == before
    audited(run_dir, "open=2")
