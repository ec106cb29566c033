"""A ledger that is missing, older than the rest of its run, or of another run is refused, and no data is lost."""

import asyncio
import re
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from staleflow.clients.trainer.checkpoint import Checkpoints, TrainerState
from staleflow.protocols.consistency.ids import Version
from staleflow.servers.trajectories.store import TABLES
from staleflow.store.lmdb import Store
from staleflow.trace.audit.report import audit
from tests.servers.running import GIVE_UP_S, WEIGHTS, Rollout, Run, StageWorker, Trainer, eventually

TRAIN = """
import sys
import time
from pathlib import Path
from staleflow.clients.trainer.main import attach
from staleflow.configs.loading.load import addresses, read_run
run_dir = Path(sys.argv[1])
config = read_run(run_dir)
sys.exit(attach(config, run_dir, "trainer", addresses(config, run_dir).scheduler))
"""


class Story:
    """A stopped run of two steps, whose scheduler state was copied after the first."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.older = run_dir.with_name("older")
        self.run = Run(run_dir, trainer={"batch_size": 2})

    async def tell(self) -> None:
        run = self.run
        for start in (run.scheduler, run.trajectories, run.parameters):
            start()
        trainer = await run.trainer()
        await trainer.publish(0, WEIGHTS)
        rollout, stage = await run.rollout(capacity=2), StageWorker(run)
        await self._step(trainer, rollout, stage, 0)
        await run.stop("scheduler")
        self.keep("scheduler", "trace.jsonl")
        run.scheduler()
        await self._step(trainer, rollout, stage, 1)
        await rollout.push(*(await rollout.leases(2))[:2])
        identity = (await run.status(run.where.scheduler))["run"]
        state = TrainerState(version=Version(2))
        Checkpoints(self.run_dir / "checkpoints", run=identity, keep=1).save(state, _weights)
        for name in ("trajectories-0", "parameters", "scheduler"):
            await run.stop(name)
        while run.clients:  # a message of this trainer would show the next scheduler that it is alive
            run.clients.pop().close()

    async def _step(self, trainer: Trainer, rollout: Rollout, stage: StageWorker, step: int) -> None:
        await rollout.push(*(await rollout.leases(2))[:2])
        done = 0
        while done < 2:
            items, _ = await stage.take(most=2 - done)
            await stage.finish(items)
            done += len(items)
        batch = await trainer.next_batch(step)
        await trainer.publish(step + 1, {"w": np.full(3, step, np.float32)}, batch.batch)

    def keep(self, *names: str) -> None:
        """Copy parts of the run directory."""
        self.older.mkdir(exist_ok=True)
        for name in names:
            _copy(self.run_dir / name, self.older / name)

    def restore(self, *names: str) -> None:
        """Restore the older copy."""
        for name in names:
            self.lose(name)
            _copy(self.older / name, self.run_dir / name)

    def lose(self, *names: str) -> None:
        for name in names:
            path = self.run_dir / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def files(self) -> dict[str, bytes]:
        """Return trace, checkpoints, versions and payload as they are on the disk."""
        found = [*self.run_dir.glob("trace.jsonl")]
        for folder in ("checkpoints", "parameters", "trajectories-0"):
            found += (self.run_dir / folder).rglob("*")
        files = [
            path for path in found if path.is_file() and path.suffix != ".mdb" and path.name not in ("owner", "crash")
        ]
        return {str(path.relative_to(self.run_dir)): path.read_bytes() for path in files} | self._payload()

    def _payload(self) -> dict[str, bytes]:
        if not (self.run_dir / "trajectories-0").exists():
            return {}
        store = Store(self.run_dir / "trajectories-0", tables=TABLES, map_bytes=16 << 20, durability="process")
        try:
            with store.read() as txn:
                found = {f"{table} {key.hex()}": value for table in TABLES for key, value in txn.items(table)}
        finally:
            store.close()
        assert found, "void: there is no payload"
        return found

    async def refused(self, *process: str | int) -> str:
        """Start a server that must refuse to start and must change nothing; return the one line that it prints."""
        before = self.files()
        role, *shard = process
        assert isinstance(role, str)
        self.run.process(role, *(int(one) for one in shard))
        code, said = await asyncio.to_thread(self.run.ended, "-".join(map(str, process)))
        assert code == 2, said
        after = self.files()
        if role != "scheduler":  # the running scheduler traces every attach
            after["trace.jsonl"] = before["trace.jsonl"]
        assert after == before
        return said


def _weights(path: Path) -> None:
    (path / "weights").write_bytes(b"w")


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target) if source.is_dir() else shutil.copyfile(source, target)


@pytest.fixture
async def story(short_dir: Path) -> AsyncIterator[Story]:
    story = Story(short_dir / "run")
    await story.tell()
    yield story
    await story.run.close()


def _missing_file(story: Story) -> None:
    story.lose("scheduler/data.mdb")


def _missing_folder(story: Story) -> None:
    story.lose("scheduler")


def _older(story: Story) -> None:
    story.restore("scheduler")


def _of_another_run(story: Story) -> None:
    """Replace the ledger by one of another run with the same configuration."""
    story.lose("scheduler")
    aside = story.run_dir.with_name("aside")
    aside.mkdir()
    for name in ("trace.jsonl", "checkpoints", "parameters"):
        (story.run_dir / name).rename(aside / name)
    story.run.process("scheduler")
    _wait_for(story.run_dir / "trace.jsonl")
    story.run.kill("scheduler")
    story.lose("trace.jsonl")
    for path in aside.iterdir():
        path.rename(story.run_dir / path.name)


def _missing_trace(story: Story) -> None:
    story.lose("trace.jsonl")


def _missing_with_its_trace(story: Story) -> None:
    story.lose("scheduler", "trace.jsonl")


def _only_versions_are_left(story: Story) -> None:
    story.lose("scheduler", "trace.jsonl", "checkpoints")


def _older_with_its_trace(story: Story) -> None:
    story.restore("scheduler", "trace.jsonl")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_missing_file, "lines of run .*, but scheduler/data.mdb is missing or empty"),
        (_missing_folder, "lines of run .*, but scheduler/data.mdb is missing or empty"),
        (_older, "lines beyond line .*, where the ledger ends: scheduler/data.mdb is an older copy"),
        (_of_another_run, "lines of run .*, but scheduler/data.mdb is of run"),
        (_missing_trace, "trace.jsonl.* is missing, and the ledger ends at its line"),
        (_missing_with_its_trace, "checkpoints/2.* is of run .*, but scheduler/data.mdb is of run .* may be new"),
        (_only_versions_are_left, "parameters.* is of run .*, but scheduler/data.mdb is of run"),
        (_older_with_its_trace, "checkpoints/2.* it knows version 2 of lineage 0, but the ledger ends at version 1"),
    ],
)
async def test_the_scheduler_refuses_a_ledger_that_is_not_that_of_its_run_directory(
    story: Story, harm: Callable[[Story], None], said: str
) -> None:
    harm(story)
    line = await story.refused("scheduler")
    assert _matches(said, line)
    assert "restore the newest copy" in line


async def test_what_was_refused_continues_once_the_newest_copy_is_back(story: Story) -> None:
    ours = story.run_dir.with_name("newest")
    shutil.copytree(story.run_dir / "scheduler", ours)
    story.lose("scheduler")
    await story.refused("scheduler")
    story.lose("scheduler")
    shutil.copytree(ours, story.run_dir / "scheduler")
    for start in (story.run.scheduler, story.run.trajectories, story.run.parameters):
        start()
    items, _ = await StageWorker(story.run).take(most=2)
    assert items, "what was acknowledged is lost"
    report = audit(story.run_dir / "trace.jsonl")
    assert report.violations == []
    assert report.events["consume"] == 2


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_missing_with_its_trace, "is of run .*, but scheduler/data.mdb is of run"),
        (_older_with_its_trace, "it knows .*, but the ledger"),
    ],
    ids=["a new ledger", "an older ledger"],
)
@pytest.mark.parametrize("server", [("trajectories", 0), ("parameters",)], ids=["trajectories", "parameters"])
async def test_a_server_of_another_machine_refuses_a_ledger_that_lost_its_history(
    story: Story, harm: Callable[[Story], None], said: str, server: tuple[str | int, ...]
) -> None:
    """The scheduler's machine has lost everything that the other servers still have."""
    harm(story)
    aside = story.run_dir.with_name("aside")
    aside.mkdir()
    for name in ("checkpoints", "parameters"):
        (story.run_dir / name).rename(aside / name)
    story.run.scheduler()
    await eventually(lambda: _answers(story.run))
    for path in aside.iterdir():
        path.rename(story.run_dir / path.name)
    assert _matches(said, await story.refused(*server))


@pytest.mark.parametrize("lost", ["everything", "the newest step"])
async def test_a_trainer_of_another_machine_refuses_a_ledger_that_lost_its_history(story: Story, lost: str) -> None:
    if lost == "everything":
        story.lose("scheduler", "trace.jsonl", "parameters", "trajectories-0")
    else:
        story.restore("scheduler", "trace.jsonl")
        story.lose("parameters", "trajectories-0")
    kept = story.run_dir / "checkpoints"
    aside = kept.rename(story.run_dir.with_name("aside"))
    for start in (story.run.scheduler, story.run.trajectories, story.run.parameters):
        start()
    await eventually(lambda: _answers(story.run))
    aside.rename(kept)
    trainer = await _run(sys.executable, "-c", TRAIN, str(story.run_dir))
    line = trainer.stderr.splitlines()[-1]
    assert trainer.returncode == 2, line
    known = "is of run" if lost == "everything" else "it knows version 2 of lineage 0"
    assert _matches(f"checkpoints/2.* {known}", line)
    assert (kept / "2" / "weights").read_bytes() == b"w"


async def test_a_missing_shard_is_given_up_and_not_refused(story: Story) -> None:
    """Decision 0027: payload on a lost disk is given up by the shard that lacks it."""
    story.lose("trajectories-0")
    for start in (story.run.scheduler, story.run.trajectories, story.run.parameters):
        start()
    await eventually(lambda: _none_pushed(story.run))


async def _run(*command: str) -> "subprocess.CompletedProcess[str]":
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False, timeout=60)


async def _answers(run: Run) -> bool:
    return bool(await run.status(run.where.scheduler))


async def _none_pushed(run: Run) -> bool:
    return bool((await run.status(run.where.scheduler))["ledger"]["pushed"] == 0)


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + GIVE_UP_S
    while not (path.exists() and path.stat().st_size):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _matches(pattern: str, line: str) -> bool:
    assert re.search(pattern, line), line
    return True
