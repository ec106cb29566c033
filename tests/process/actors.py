"""Witnesses: a rollout worker, a reward worker and a trainer over the shipped client, each with its own journal.

Each witness records its intention before every step and the outcome after it. Payload and weights are functions of
their names, so the audit can attribute every byte. The witnesses deliberately misbehave: a rollout worker pushes under
every lease it ever held, and a fenced trainer tries every other operation as well.

To run one as a separate process: ``python -m tests.process.actors ROLE RUN_DIR NAME [KEY=VALUE ...]``.
"""

import asyncio
import os
import random
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from staleflow.clients.attachment import attach
from staleflow.clients.weights import Publisher, Puller
from staleflow.configs.loading.load import addresses, read_run
from staleflow.net.client import Client, worker_id
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import BatchId, LeaseId, Lineage, Step, TrainerTerm, Version
from staleflow.protocols.wire.messages import (
    Abort,
    Assign,
    Attach,
    Batch,
    Commands,
    Done,
    GetBatch,
    GetGroups,
    GetStageWork,
    Groups,
    InstanceStats,
    Join,
    JoinReply,
    Pull,
    Pulled,
    PushGroups,
    PushItem,
    PutStageResults,
    RegisterCheckpoint,
    RegisterCheckpointReply,
    RegisterVersion,
    RegisterVersionReply,
    Report,
    Results,
    StageResult,
    StageWork,
)
from staleflow.protocols.wire.tensors import arrays, specs_and_frames
from staleflow.supervisor import lifeline
from tests.audit import prf
from tests.audit.journal import Journal

FENCED_EXIT = 3
"""Exit code of a trainer that was fenced."""


class Actor:
    """Common parts of all witnesses: name, journal, connections."""

    def __init__(self, run_dir: Path, name: str) -> None:
        self.run_dir = run_dir
        self.name = name
        self.config = read_run(run_dir)
        self.seed = self.config.seed
        self.me = worker_id(name)
        self.journal = Journal(run_dir / "journals" / f"{name}.jsonl")
        self.where = addresses(self.config, run_dir)
        self.scheduler = Client(self.where.scheduler, worker=self.me)
        self.shards = [Client(address, worker=self.me) for address in self.where.trajectories]
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in (self.scheduler, *self.shards):
            client.close()


class Rollout(Actor):
    """Push one group per lease after ``hold_s`` on average; if ``stubborn``, push under aborted leases as well."""

    def __init__(
        self, run_dir: Path, name: str, *, capacity: int = 16, hold_s: float = 0.0, stubborn: bool = False
    ) -> None:
        super().__init__(run_dir, name)
        self._capacity, self._hold_s, self._stubborn = capacity, hold_s, stubborn
        self._puller = Puller(self.where.parameters, worker=self.me)
        self._held: dict[LeaseId, asyncio.Task[None]] = {}
        self._loaded: tuple[int, int] = (-1, -1)
        self._turned = asyncio.Condition()
        self._news = asyncio.Event()
        self._ack = 0
        self.counts = {"sent": 0, "acknowledged": 0, "stale": 0}

    async def run(self) -> None:
        """Work until cancelled."""
        hello = Attach(worker=self.me, name=self.name, role="rollout", capacity=self._capacity)
        await attach(self.scheduler, hello, parameters=True)
        while True:
            stats = InstanceStats(lineage=Lineage(max(self._loaded[0], 0)), version=Version(self._loaded[1]))
            report = Report(worker=self.me, ack=self._ack, held=list(self._held), stats=stats, wait_ms=1000)
            self._news.clear()
            asking = asyncio.ensure_future(self.scheduler.ask(report, Commands, timeout_s=None))
            waking = asyncio.ensure_future(self._news.wait())
            try:
                await asyncio.wait((asking, waking), return_when=asyncio.FIRST_COMPLETED)
                if asking.done():
                    self._take(asking.result())
            finally:
                asking.cancel()
                waking.cancel()

    def _take(self, commands: Commands) -> None:
        for number, command in enumerate(commands.commands, start=commands.first):
            if number > self._ack:
                self._ack = number
                self._obey(command)

    def _obey(self, command: object) -> None:
        match command:
            case Pull(lineage=lineage, version=version):
                self.spawn(self._pull(lineage, version))
            case Assign() if command.lease not in self._held:
                self.journal.write("leased", worker=self.me, group=command.group, lease=command.lease)
                self._held[command.lease] = self.spawn(self._push(command))
            case Abort(lease=lease) if not self._stubborn:
                if (task := self._held.pop(lease, None)) is not None:
                    task.cancel()
            case _:
                pass

    async def _pull(self, lineage: Lineage, version: Version) -> None:
        ok, sha = True, ""
        try:
            async with await self._puller.pull(lineage, version) as pulled:
                held = {name: array.copy() for name, array in pulled.arrays().items()}
                sha = pulled.sha
        except Refused:
            ok = False
        else:
            _, lineage_read, version_read = held["identity"].tolist()
            prints = prf.fingerprint(held)
            self.journal.write("pulled", lineage=lineage_read, version=version_read, prints=prints)
            async with self._turned:
                self._loaded = max(self._loaded, (lineage_read, version_read))
                self._turned.notify_all()
            self._news.set()
        told = Pulled(worker=self.me, lineage=lineage, version=version, sha=sha, ok=ok)
        await self.scheduler.ask(told, Done, timeout_s=None)

    async def _push(self, lease: Assign) -> None:
        async with self._turned:
            await self._turned.wait_for(lambda: self._loaded >= (lease.lineage, lease.version))
        await asyncio.sleep(self._hold_s * random.uniform(0.0, 2.0))
        lineage, version = self._loaded
        specs, frames = specs_and_frames(prf.payload(self.seed, lease.group, lease.lease, lineage, version))
        item = PushItem(group=lease.group, lease=lease.lease, worker=self.me, truncated=False, frames=specs)
        names = {"group": lease.group, "lease": lease.lease}
        self.journal.write("sent", worker=self.me, lineage=lineage, version=version, **names)
        self.counts["sent"] += 1
        try:
            shard, push = self.shards[lease.shard], PushGroups(items=[item])
            while (code := (await shard.ask(push, Results, frames, timeout_s=None)).results[0].code) is Code.BUSY:
                # once the shard has room, push the same bytes again
                await shard.ask(PushGroups(items=[]), Results, timeout_s=None)
        except Refused as no:
            code = no.code
        self.journal.write("answered", code="" if code is None else code.value, **names)
        self.counts["acknowledged"] += code is None
        self.counts["stale"] += code in (Code.STALE, Code.STALE_LEASE)
        self._held.pop(lease.lease, None)
        if not self._held:
            self._news.set()

    async def close(self) -> None:
        await super().close()
        self._puller.close()


class Rewarder(Actor):
    """Reward worker that scores the groups of one shard."""

    def __init__(self, run_dir: Path, name: str, *, shard: int = 0) -> None:
        super().__init__(run_dir, name)
        self._shard = self.shards[shard]

    async def run(self) -> None:
        """Work until cancelled."""
        take = GetStageWork(stage="reward", worker=self.me, max_groups=16, wait_ms=1000)
        while True:
            work, _ = await self._shard.call(take, timeout_s=None)
            assert isinstance(work, StageWork)
            results: list[StageResult] = []
            frames: list[memoryview] = []
            for item in work.items:
                specs, more = specs_and_frames({"reward": prf.rewards(self.seed, item.group, item.lease)})
                frames += more
                results.append(StageResult(group=item.group, lease=item.lease, ticket=item.ticket, frames=specs))
            if results:
                finish = PutStageResults(stage="reward", worker=self.me, results=results)
                await self._shard.ask(finish, Results, frames, timeout_s=None)


class Trainer(Actor):
    """Take batches and publish versions. ``die`` names the point of step ``at`` at which the trainer kills itself.

    ``delivered``: the trainer has the batch. ``stepped``: the optimiser step is done, nothing is published.
    ``published``: the new version is published, and the trainer has not received the reply.
    """

    def __init__(
        self, run_dir: Path, name: str, *, checkpoint_every: int = 0, die: str = "", at: int = -1, think_s: float = 0.0
    ) -> None:
        super().__init__(run_dir, name)
        self._every, self._die, self._at, self._think_s = checkpoint_every, die, at, think_s
        self._checkpoint = run_dir / "witness.json"
        self._publisher = Publisher(self.where.parameters, worker=self.me)
        self._joined = JoinReply(trainer_term=TrainerTerm(0), lineage=Lineage(0), version=Version(-1))
        self.version = 0

    async def run(self, steps: int = 1_000_000) -> None:
        """Train; raise ``SystemExit`` once another trainer has taken over and every other operation has been tried."""
        await attach(self.scheduler, Attach(worker=self.me, name=self.name, role="trainer"), parameters=True)
        await self._join()
        while self.version < steps:
            try:
                await self._step(Step(self.version))
            except Refused as no:
                if no.code is Code.FENCED:
                    await self._insist()
                    sys.exit(FENCED_EXIT)
                if no.code not in (Code.STALE, Code.BAD_VERSION):
                    raise

    async def _join(self) -> None:
        lineage, self.version = 0, 0
        if self._checkpoint.exists():
            lineage, self.version = msgspec.json.decode(self._checkpoint.read_bytes(), type=tuple[int, int])
        join = Join(trainer=self.me, lineage=Lineage(lineage), version=Version(self.version))
        self._joined = await self.scheduler.ask(join, JoinReply, timeout_s=None)
        self.journal.write("joined", term=self._joined.trainer_term, lineage=self._joined.lineage, version=self.version)
        if self._joined.version < 0:
            await self._publish(0, None)

    async def _step(self, step: Step) -> None:
        ask = GetBatch(trainer_term=self._joined.trainer_term, step=step, wait_ms=1000)
        batch = await self.scheduler.ask(ask, Batch, timeout_s=None)
        members = await self._fetch(batch)
        self.journal.write(
            "delivered", step=batch.step, batch=batch.batch, lineage=batch.lineage, digest=batch.digest, members=members
        )
        self._point("delivered")
        await asyncio.sleep(self._think_s)
        await self._publish(step + 1, batch.batch)
        if self._every and self.version % self._every == 0:
            await self._save()

    async def _fetch(self, batch: Batch) -> list[dict[str, object]]:
        prints: dict[int, str] = {}
        for number, shard in enumerate(self.shards):
            wanted = [member for member in batch.members if member.shard == number]
            fetch = GetGroups(groups=[member.group for member in wanted], shas=[member.sha for member in wanted])
            reply, frames = await shard.call(fetch, timeout_s=None)
            assert isinstance(reply, Groups)
            for group in reply.groups:
                mine, frames = frames[: len(group.frames)], frames[len(group.frames) :]
                prints[group.group] = prf.fingerprint(arrays(group.frames, mine))
        return [{"group": m.group, "lease": m.lease, "prints": prints[m.group]} for m in batch.members]

    async def _publish(self, version: int, batch: BatchId | None) -> None:
        names = {"term": self._joined.trainer_term, "lineage": self._joined.lineage, "version": version, "batch": batch}
        self.journal.write("committing", **names)
        self._point("stepped")
        await self._offer(version, batch)
        self._point("published")
        self.journal.write("published", **names)
        self.version = version

    async def _offer(self, version: int, batch: BatchId | None) -> None:
        await self._publisher.publish(
            prf.weights(self.seed, self._joined.lineage, version),
            trainer_term=self._joined.trainer_term,
            lineage=self._joined.lineage,
            version=Version(version),
            batch=batch,
        )

    async def _save(self) -> None:
        """Write the checkpoint file first, then register it with the scheduler."""
        part = self._checkpoint.with_suffix(".part")
        part.write_bytes(msgspec.json.encode((self._joined.lineage, self.version)))
        part.replace(self._checkpoint)
        await self._say_checkpoint()

    async def _say_checkpoint(self) -> None:
        term, lineage = self._joined.trainer_term, self._joined.lineage
        said = RegisterCheckpoint(trainer_term=term, lineage=lineage, version=Version(self.version))
        await self.scheduler.ask(said, RegisterCheckpointReply, timeout_s=None)

    async def _insist(self) -> None:
        """Try every operation after being fenced, and journal each rejection and each success."""
        term, lineage, version = self._joined.trainer_term, self._joined.lineage, self.version + 1
        again = RegisterVersion(
            trainer_term=term, lineage=lineage, version=Version(version), batch=BatchId(1), sha="0" * 64, nbytes=1
        )
        tries: dict[str, Coroutine[Any, Any, object]] = {
            "seal": self.scheduler.ask(GetBatch(trainer_term=term, step=Step(version)), Batch),
            "publish": self._offer(version, BatchId(1)),
            "consume": self.scheduler.ask(again, RegisterVersionReply),
            "checkpoint": self._say_checkpoint(),
        }
        for op, attempt in tries.items():
            try:
                await attempt
                code = ""
            except Refused as no:
                code = no.code.value
            what = "fenced" if code == Code.FENCED.value else "not fenced"
            self.journal.write(what, op=op, code=code, term=term, lineage=lineage, version=version)

    def _point(self, name: str) -> None:
        if name == self._die and self.version == self._at:
            os.kill(os.getpid(), signal.SIGKILL)

    async def close(self) -> None:
        await super().close()
        self._publisher.close()


def main() -> int:
    lifeline.watch_supervisor()
    role, run_dir, name, *given = sys.argv[1:]
    options: dict[str, Any] = {}
    for word in given:
        key, _, value = word.partition("=")
        options[key] = value if key == "die" else float(value) if key.endswith("_s") else int(value)
    kinds = {"rollout": Rollout, "reward": Rewarder, "trainer": Trainer}

    async def work() -> None:
        actor = kinds[role](Path(run_dir), name, **options)
        try:
            await actor.run()
        finally:
            await actor.close()

    uvloop.run(work())
    return 0


if __name__ == "__main__":
    sys.exit(main())
