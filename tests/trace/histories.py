"""Random histories of the real ledger, written as real traces, for the auditor to read."""

import random
from pathlib import Path

from staleflow.protocols.consistency import events
from staleflow.protocols.consistency.effects import Effect, ReleaseWhy
from staleflow.protocols.consistency.events import Event
from staleflow.protocols.consistency.groups import State
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Segment, Step, TrainerTerm, Version, WorkerId
from staleflow.protocols.consistency.limits import Bound, Limits, OnOverdue
from staleflow.protocols.consistency.machine import Machine
from staleflow.store.lmdb import Store
from staleflow.trace import events as ev
from staleflow.trace.events import event_of
from staleflow.trace.writer import TABLES, Trace

TRAINER = WorkerId("trainer.1")
WORKERS = [WorkerId(f"rollout-{n}.1") for n in range(3)]


class History:
    """One run: events go to the machine, its effects to the trace, one commit per event."""

    def __init__(self, folder: Path, limits: Limits, seed: int) -> None:
        self.path = folder / "trace.jsonl"
        self.limits = limits
        self.machine = Machine(limits)
        self.random = random.Random(seed)
        self.now = 0
        self.next_group = 0
        self.held: dict[GroupId, tuple[LeaseId, WorkerId]] = {}
        self._folder = folder
        self._incarnation = 0
        self._open()

    def _open(self) -> None:
        self._incarnation += 1
        self._store = Store(self._folder / "store", tables=TABLES, map_bytes=64 << 20, durability="process")
        self._trace = Trace(self.path, self._store, run="r", incarnation=self._incarnation, durability="process")
        counts = self.machine.state_counts()
        limits = self.limits
        self._trace.add(
            ev.Open(
                max_staleness=limits.max_staleness,
                batch_size=limits.batch_size,
                group_size=2,
                bound=limits.bound,
                min_trainable=limits.min_trainable,
                on_overdue=limits.on_overdue,
                lease_ms=limits.lease_ms,
                protocol=1,
                config_sha="c",
                recovered=ev.Recovered(
                    reserved=counts["leased"] + counts["pushed"],
                    occupied=counts["occupied"],
                    sealed=counts["sealed"],
                    last_seq=self._trace.seq,
                    lineage=self.machine.lineage,
                    version=self.machine.version,
                ),
            )
        )
        self._commit()

    def _commit(self) -> None:
        with self._store.write() as txn:
            self._trace.commit(txn)
        self._trace.committed()

    def do(self, event: Event) -> tuple[Effect, ...]:
        effects = self.machine.apply(event, self.now)
        for effect in effects:
            if (line := event_of(effect)) is not None:
                self._trace.add(line)
        self._commit()
        return effects

    def close(self) -> None:
        counts = self.machine.state_counts()
        reserved = counts["leased"] + counts["pushed"]
        self._trace.add(ev.Close(why="done", reserved=reserved, occupied=counts["occupied"]))
        self._commit()
        self._trace.close()
        self._store.close()

    def restart(self) -> None:
        """Restart as after ``kill -9``: the ledger is restored from its stored rows."""
        self._trace.close()
        self._store.close()
        rows = [(key, tuple(row)) for key, row in self.machine.rows().items()]
        self.machine = Machine.restore(self.limits, self.machine.globals_row(), rows, self.now)
        self._open()

    # --- random steps --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.do(events.Join(trainer=TRAINER, lineage=Lineage(0), version=Version(0)))
        self.do(events.Publish(trainer_term=TrainerTerm(1), sha="v0", nbytes=8))

    def wander(self, steps: int) -> None:
        """Take ``steps`` random steps, most of them useful."""
        choices = [self.reserve] * 12 + [self.push] * 10 + [self.occupy] * 10 + [self.train] * 4
        choices += [self.expire, self.filter, self.quarantine, self.checkpoint, self.roll_back, self.restart]
        for _ in range(steps):
            self.now += 1
            self.random.choice(choices)()

    def _groups(self, state: State) -> list[GroupId]:
        views = ((group, self.machine.group(group)) for group in self.held)
        return [group for group, view in views if view is not None and view.state is state]

    def reserve(self) -> None:
        machine = self.machine
        oldest = max(0, machine.next_step - self.limits.max_staleness)
        version = Version(self.random.randint(min(oldest, machine.version), machine.version))
        if machine.room(version):
            group = GroupId(self.next_group)
            self.next_group += 1
            worker = self.random.choice(WORKERS)
            effects = self.do(events.Reserve(group=group, worker=worker, version=version))
            self.held[group] = (effects[0].lease, worker)  # type: ignore[union-attr,assignment]

    def push(self) -> None:
        if leased := self._groups(State.LEASED):
            group = self.random.choice(leased)
            view = self.machine.group(group)
            assert view is not None
            versions = sorted({view.version, Version(self.random.randint(view.version, self.machine.version))})
            segments = tuple(Segment(self.machine.lineage_of(v), v, self.random.randint(1, 9)) for v in versions)
            self.do(
                events.Push(
                    group=group,
                    lease=view.lease,
                    worker=view.worker,
                    shard=0,
                    sha=f"sha{group}",
                    nbytes=9,
                    truncated=False,
                    segments=segments,
                    sequence_tokens=9,
                )
            )

    def occupy(self) -> None:
        if pushed := self._groups(State.PUSHED):
            group = self.random.choice(pushed)
            view = self.machine.group(group)
            assert view is not None
            self.do(events.Occupy(group=group, lease=view.lease))

    def train(self) -> None:
        machine = self.machine
        sealed = machine.sealed_batch(Step(max(machine.version, 0)))
        if sealed is not None:
            term = machine.trainer_term
            self.do(events.Deliver(batch=sealed.batch, trainer_term=term, rank=0))
            sha = f"v{sealed.step + 1}.{machine.lineage}"
            self.do(events.Consume(batch=sealed.batch, step=sealed.step, trainer_term=term, sha=sha, nbytes=8))

    def expire(self) -> None:
        self.now += self.limits.lease_ms
        self.do(events.Renew(worker=WORKERS[0]))
        self.do(events.Tick())

    def filter(self) -> None:
        if pushed := self._groups(State.PUSHED):
            group = self.random.choice(pushed)
            view = self.machine.group(group)
            assert view is not None
            self.do(events.Release(group=group, lease=view.lease, why=ReleaseWhy.FILTERED))

    def quarantine(self) -> None:
        if found := self._groups(self.random.choice((State.OCCUPIED, State.SEALED))):
            self.do(events.Quarantine(group=self.random.choice(found)))

    def checkpoint(self) -> None:
        machine = self.machine
        self.do(
            events.Checkpointed(
                trainer_term=machine.trainer_term,
                lineage=machine.lineage_of(machine.version),
                version=machine.version,
                keep=self.random.randint(1, 3),
            )
        )

    def roll_back(self) -> None:
        _, kept = self.machine.oldest_checkpoint
        version = Version(self.random.randint(kept, self.machine.version))
        trainer = WorkerId(f"trainer.{self.now}")
        self.do(events.Join(trainer=trainer, lineage=self.machine.lineage_of(version), version=version))


def limits_of(seed: int) -> Limits:
    """Return a small, different ledger for each seed."""
    chosen = random.Random(seed)
    bound = Bound.TOKEN if seed % 3 == 2 else Bound.TRAJECTORY
    return Limits(
        max_staleness=chosen.randint(0, 3),
        batch_size=chosen.randint(1, 4),
        lease_ms=50,
        bound=bound,
        on_overdue=OnOverdue.WAIT if bound is Bound.TOKEN else chosen.choice(list(OnOverdue)),
        min_trainable=chosen.choice((0.0, 0.3)) if bound is Bound.TOKEN else 0.0,
        max_spares=0 if bound is Bound.TOKEN else chosen.choice((0, 2)),
    )


def history(folder: Path, seed: int, steps: int = 300) -> Path:
    """Record a whole random run; return the path of its trace."""
    told = History(folder, limits_of(seed), seed)
    told.begin()
    told.wander(steps)
    told.close()
    return told.path
