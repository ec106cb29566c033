"""The scheduler under malformed messages: the real service on a store in memory and a clock that stands still."""

import shutil
from collections.abc import Hashable, Sequence
from pathlib import Path
from random import Random

from bench.fuzz_messages import Raw, Said
from bench.fuzz_target import UNREADABLE, Ears, Finding, must_be_unchanged, read, signature
from staleflow.configs.schema import Config, Prompts, Reward, Rollout, Scheduler, Staleness
from staleflow.configs.trainer import Trainer
from staleflow.protocols.consistency.effects import Code, ReleaseWhy
from staleflow.protocols.consistency.groups import GroupView, State
from staleflow.protocols.consistency.ids import BatchId, GroupId, LeaseId, Lineage, Segment, Step, Version, WorkerId
from staleflow.protocols.consistency.machine import Machine
from staleflow.protocols.wire import messages
from staleflow.protocols.wire.messages import Op
from staleflow.servers.scheduler.ledger.interpreter import TABLES
from staleflow.servers.scheduler.main import open_service
from staleflow.store.memory import MemoryStore
from staleflow.trace.audit.report import audit
from staleflow.trace.audit.state import Rule

WORKER, SHARD, TRAINER, PARAMETERS = (WorkerId(name) for name in ("rollout-0", "trajectories-0", "trainer", "server"))
MANY_STEPS = 10**6
LATE_MS = 50


class StandingClock:
    """A clock that moves only on command."""

    def __init__(self) -> None:
        self.ms = 1_000_000

    def now_ns(self) -> int:
        return self.ms * 1_000_000

    def now_ms(self) -> int:
        return self.ms

    def unix_ns(self) -> int:
        return self.now_ns()


class SchedulerTarget:
    """One run with a worker that holds leases, a shard, a parameter server and a trainer."""

    def __init__(self, folder: Path, random: Random) -> None:
        self._folder, self._random = folder, random
        self._config = Config(
            prompts=Prompts(source="nobody:opens"),
            reward=Reward(run="nobody:calls"),
            staleness=Staleness(max_staleness=1),
            rollout=Rollout(engine="simulated", group_size=2),
            trainer=Trainer(backend="simulated", batch_size=2, steps=MANY_STEPS),
            scheduler=Scheduler(lease_s=3.0),
        )
        self._begin()

    def _begin(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        self._clock, self._store = StandingClock(), MemoryStore(TABLES)
        self._service, self._interpreter = open_service(self._config, self._folder, self._store, self._clock)
        self._ears = Ears(self._service.on_call)
        for message in self._hellos():
            self._say(message)
        self._say(Said(TRAINER, messages.Join(trainer=TRAINER, lineage=Lineage(0), version=Version(0))))
        self._say(Said(PARAMETERS, self._register(None)))

    def _hellos(self) -> list[Said]:
        def hello(worker: WorkerId, role: str, **more: int | str) -> Said:
            return Said(worker, messages.Attach(worker=worker, name=worker, role=role, **more))  # type: ignore[arg-type]

        return [
            hello(SHARD, "trajectories", endpoint="ipc:///none", rows=500, prompts_sha="p"),
            hello(PARAMETERS, "parameters", endpoint="ipc:///none"),
            hello(TRAINER, "trainer"),
            hello(WORKER, "rollout", capacity=6),
        ]

    def _say(self, said: Said) -> None:
        """Messages that are valid now."""
        self._ears.say(said.peer, said.body, then=self._service.flush)

    # --- valid messages --------------------------------------------------------------------------------------------

    def seeds(self) -> Sequence[Said]:
        machine = self._interpreter.machine
        held = machine.leases_of(WORKER)
        known = [view for group in self._groups() if (view := machine.group(group)) is not None]
        requests = [*self._hellos(), *self._of_workers(held), *self._of_trainer(machine)]
        requests += [Said(SHARD, messages.Operations(ops=[op])) for view in known for op in self._ops(view)]
        requests.append(Said(SHARD, messages.Operations(ops=[op for view in known[:3] for op in self._ops(view)])))
        return requests

    def _groups(self) -> list[GroupId]:
        _, rows = self._interpreter.machine.snapshot()
        groups = [GroupId(key) for key, _ in rows if key < 2**61]
        return groups if len(groups) < 6 else self._random.sample(groups, 6)

    def _of_workers(self, held: Sequence[tuple[GroupId, LeaseId]]) -> list[Said]:
        machine = self._interpreter.machine
        stats = messages.InstanceStats(lineage=machine.lineage, version=machine.version, running=3, tokens_per_s=9.5)
        leases = [lease for _, lease in held]
        loaded = messages.Pulled(worker=WORKER, lineage=machine.lineage, version=machine.version, sha="0" * 64, ok=True)
        return [
            Said(WORKER, messages.Report(worker=WORKER, ack=0, held=leases, stats=stats)),
            Said(WORKER, messages.Report(worker=WORKER, ack=5, held=leases[:1], stats=stats)),
            Said(WORKER, loaded),
            Said(SHARD, messages.GetRetained(shard=0, groups=[group for group, _ in held])),
            Said(SHARD, messages.PromptFeatures(shard=0, rows=[], frames=[])),
            Said(SHARD, messages.StageLoads(shard=0, loads=[_load([group for group, _ in held])], used_share=0.1)),
            Said("x", messages.GetStatus()),
        ]

    def _of_trainer(self, machine: Machine) -> list[Said]:
        term, step = machine.trainer_term, Step(max(machine.version, 0))
        sealed = machine.sealed_batch(step)
        lineage, version = machine.checkpoint
        return [
            Said(TRAINER, messages.Join(trainer=TRAINER, lineage=machine.lineage, version=machine.version)),
            Said(TRAINER, messages.GetBatch(trainer_term=term, step=step)),
            Said(TRAINER, messages.GetClaims(trainer_term=term, step=machine.next_step, held=[], count=1)),
            Said(TRAINER, messages.Metrics(worker=TRAINER, step=step, values={"loss": 1.0})),
            Said(TRAINER, messages.RegisterCheckpoint(trainer_term=term, lineage=lineage, version=version)),
            Said(PARAMETERS, self._register(None if sealed is None else sealed.batch)),
            Said(PARAMETERS, messages.GetRetainedVersions()),
        ]

    def _register(self, batch: BatchId | None) -> messages.RegisterVersion:
        machine = self._interpreter.machine
        return messages.RegisterVersion(
            trainer_term=machine.trainer_term,
            lineage=machine.lineage,
            version=Version(machine.version + 1),
            batch=batch,
            sha=f"{machine.version + 1:064d}",
            nbytes=10,
        )

    def _ops(self, view: GroupView) -> list[Op]:
        ids = {"group": view.group, "lease": view.lease}
        push = messages.RegisterPush(
            group=view.group,
            lease=view.lease,
            worker=WORKER,
            shard=0,
            sha=f"{view.lease:064d}",
            nbytes=100,
            truncated=False,
            segments=[Segment(view.lineage, view.version, 6)],
            samples=[3, 3],
            sequence_tokens=10,
        )
        occupy = messages.RegisterOccupy(group=view.group, lease=view.lease)
        release = messages.RegisterRelease(group=view.group, lease=view.lease, why=ReleaseWhy.ABORTED)
        quarantine = messages.RegisterQuarantine(group=view.group)
        if view.state is State.LEASED:
            yields = messages.RegisterYield(**ids, lineage=view.lineage, version=view.version, sha="0" * 64)  # type: ignore[arg-type]
            return [push, push, push, yields, release]
        return [push, occupy, occupy, occupy, release, quarantine]

    # --- messages ----------------------------------------------------------------------------------------------------

    def offer(self, raw: Raw) -> str:
        if (body := read(raw)) is None:
            self._service.on_reject(raw.peer, Code.MALFORMED, "")
            return UNREADABLE
        before, after = self._state(), list[Hashable]()

        def then() -> None:
            after.append(self._state())
            self._service.flush()  # the reply is sent with the commit

        reply = self._ears.say(raw.peer, body, raw.frames, then=then)
        must_be_unchanged(body, reply, before, after[0])
        return signature(body, reply)

    def _state(self) -> Hashable:
        interpreter, phase = self._interpreter, self._service.phase
        prompts = interpreter.prompts
        return (
            interpreter.machine.snapshot(),
            prompts.rows,
            prompts.num_requeued,
            phase.draining,
            phase.finished,
            phase.closed,
        )

    async def settle(self) -> None:
        """Advance the clock; check the ledger, and compare it with the state that a restart reads from the store."""
        for _ in range(3):
            self._clock.ms += LATE_MS
            self._service.tick([WORKER, SHARD])
        self._interpreter.machine.check()
        kept = self._interpreter.machine.snapshot()
        self._interpreter.load()
        if self._interpreter.machine.snapshot() != kept:
            raise Finding("a restart would find another ledger than this one")
        if self._service.phase.draining or self._service.phase.closed:
            await self.close()
            self._begin()

    async def close(self) -> None:
        """The auditor checks the trace, except loads of unpublished versions: those rest on the worker's own report."""
        self._service.close("fuzzed")
        self._interpreter.trace.close()
        report = audit(self._folder / "trace.jsonl")
        wrong = [violation for violation in report.violations if violation.rule is not Rule.PULL]
        if wrong:
            raise Finding(f"trace check: {wrong[:3]}")


def _load(groups: list[GroupId]) -> messages.StageLoad:
    return messages.StageLoad(stage="reward", waiting=1, taken=len(groups), groups=groups)
