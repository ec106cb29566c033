"""A run whose versions lie in shared memory: it leaves nothing there, and resumes after a reboot has emptied it."""

import contextlib
import shutil
from pathlib import Path

import psutil

from staleflow.process import memory_folder
from tests.process.running import END_S, Run, audited

SMALL = ("trainer.steps=30", "trainer.checkpoint_every=4", "trainer.simulated_step_s=0.4", "parameters.store=memory")


def test_a_run_resumes_after_a_reboot_and_leaves_nothing_in_memory(run_dir: Path) -> None:
    folder = memory_folder.path_of(run_dir / "parameters")
    with Run(run_dir, "simulated.toml", *SMALL) as run:
        run.wait_for("checkpoint", 1, END_S, version=4)
        run.wait_for("publish", 6, END_S)  # usually beyond the checkpoint, so that the resumed trainer rolls back
        assert list(folder.glob("*.bin"))
        assert not list((run_dir / "parameters").glob("*.bin"))
        family = run.family()
        run.process.kill()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has noticed the end of its supervisor
                process.kill()
        psutil.wait_procs(family, timeout=30)
    shutil.rmtree(folder, ignore_errors=True)  # the start of any other run may have swept it already
    assert not folder.exists()
    with Run(run_dir, str(run_dir / "config.toml"), "--resume") as run:
        output = run.finish(END_S)
    assert run.process.returncode == 0, output
    assert not folder.exists()
    assert "published again" in (run_dir / "logs" / "trainer.log").read_text()
    audited(run_dir, "consume=30")
