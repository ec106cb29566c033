"""A machine with short methods for its events; every invariant is checked after every event."""

from staleflow.protocols.consistency.effects import (
    Code,
    Consumed,
    Delivered,
    DropWhy,
    Effect,
    Rejected,
    ReleaseWhy,
    Sealed,
)
from staleflow.protocols.consistency.events import (
    Checkpointed,
    Claim,
    Consume,
    Deliver,
    Detach,
    Drop,
    Event,
    Join,
    Migrate,
    Occupy,
    Publish,
    Push,
    Quarantine,
    Release,
    Renew,
    Reserve,
    Tick,
)
from staleflow.protocols.consistency.groups import GroupView
from staleflow.protocols.consistency.ids import (
    BatchId,
    GroupId,
    LeaseId,
    Lineage,
    Segment,
    Step,
    TrainerTerm,
    Version,
    WorkerId,
)
from staleflow.protocols.consistency.limits import Bound, Limits, OnOverdue
from staleflow.protocols.consistency.machine import Machine


class Scene:
    """One ledger from its first event. Version 0 is published unless ``published`` is False."""

    def __init__(
        self,
        max_staleness: int = 1,
        batch_size: int = 2,
        *,
        bound: Bound = Bound.TRAJECTORY,
        on_overdue: OnOverdue = OnOverdue.WAIT,
        min_trainable: float = 0.0,
        max_spares: int = 0,
        lease_ms: int = 100,
        published: bool = True,
    ) -> None:
        self.limits = Limits(
            max_staleness=max_staleness,
            batch_size=batch_size,
            bound=bound,
            on_overdue=on_overdue,
            min_trainable=min_trainable,
            max_spares=max_spares,
            lease_ms=lease_ms,
            debug=True,
        )
        self.machine = Machine(self.limits)
        self.now_ms = 0
        if published:
            self.join()
            self.apply(Publish(trainer_term=TrainerTerm(1), sha="v0", nbytes=1))

    def apply(self, event: Event) -> tuple[Effect, ...]:
        return self.machine.apply(event, self.now_ms)

    def view(self, group: int) -> GroupView:
        view = self.machine.group(GroupId(group))
        assert view is not None
        return view

    # --- workers ---

    def reserve(self, *groups: int, version: int = 0, worker: str = "w") -> tuple[Effect, ...]:
        done: tuple[Effect, ...] = ()
        for group in groups:
            done += self.apply(Reserve(group=GroupId(group), worker=WorkerId(worker), version=Version(version)))
        return done

    def push_event(self, group: int, *segments: tuple[int, int], sha: str = "", truncated: bool = False) -> Push:
        """Build a push with segments of (version, tokens); all of the group's version by default."""
        view = self.view(group)
        parts = segments or ((view.version, 10),)
        return Push(
            group=GroupId(group),
            lease=view.lease,
            worker=view.worker,
            shard=0,
            sha=sha or f"sha-{group}-{view.lease}",
            nbytes=1,
            truncated=truncated,
            segments=tuple(Segment(self.machine.lineage_of(Version(v)), Version(v), tokens) for v, tokens in parts),
            sequence_tokens=sum(tokens for _, tokens in parts),
        )

    def push(self, group: int, *segments: tuple[int, int]) -> tuple[Effect, ...]:
        return self.apply(self.push_event(group, *segments))

    def occupy(self, group: int) -> tuple[Effect, ...]:
        return self.apply(Occupy(group=GroupId(group), lease=self.view(group).lease))

    def finish(self, *groups: int) -> tuple[Effect, ...]:
        """Push and occupy each group; return the effects of the last occupy."""
        done: tuple[Effect, ...] = ()
        for group in groups:
            self.push(group)
            done = self.occupy(group)
        return done

    def release(self, group: int, why: ReleaseWhy = ReleaseWhy.ABORTED, lease: int | None = None) -> tuple[Effect, ...]:
        number = self.view(group).lease if lease is None else LeaseId(lease)
        return self.apply(Release(group=GroupId(group), lease=number, why=why))

    def migrate(self, group: int, to: str) -> tuple[Effect, ...]:
        return self.apply(Migrate(group=GroupId(group), lease=self.view(group).lease, to=WorkerId(to)))

    def drop(self, group: int, why: DropWhy = DropWhy.SURPLUS) -> tuple[Effect, ...]:
        return self.apply(Drop(group=GroupId(group), why=why))

    def quarantine(self, group: int) -> tuple[Effect, ...]:
        return self.apply(Quarantine(group=GroupId(group)))

    def detach(self, worker: str) -> tuple[Effect, ...]:
        return self.apply(Detach(worker=WorkerId(worker), why=ReleaseWhy.ABORTED))

    def renew(self, worker: str) -> tuple[Effect, ...]:
        return self.apply(Renew(worker=WorkerId(worker)))

    def at(self, now_ms: int) -> tuple[Effect, ...]:
        """Advance the clock to ``now_ms``."""
        self.now_ms = now_ms
        return self.apply(Tick())

    # --- the trainer ---

    def join(self, version: int = 0, lineage: int = 0, trainer: str = "t") -> tuple[Effect, ...]:
        return self.apply(Join(trainer=WorkerId(trainer), lineage=Lineage(lineage), version=Version(version)))

    def batch(self, step: int) -> Sealed:
        sealed = self.machine.sealed_batch(Step(step))
        assert sealed is not None
        return sealed

    def deliver(self, batch: int, rank: int = 0) -> tuple[Effect, ...]:
        return self.apply(Deliver(batch=BatchId(batch), trainer_term=self.machine.trainer_term, rank=rank))

    def consume_event(self, step: int, sha: str = "", term: int | None = None) -> Consume:
        trainer_term = self.machine.trainer_term if term is None else TrainerTerm(term)
        batch = self.batch(step).batch
        return Consume(batch=batch, step=Step(step), trainer_term=trainer_term, sha=sha or f"v{step + 1}", nbytes=1)

    def train(self, *steps: int) -> tuple[Effect, ...]:
        done: tuple[Effect, ...] = ()
        for step in steps:
            done = self.apply(self.consume_event(step))
        return done

    def claim(self, group: int, step: int) -> tuple[Effect, ...]:
        return self.apply(Claim(group=GroupId(group), step=Step(step), trainer_term=self.machine.trainer_term))

    def checkpointed(self, version: int, lineage: int = 0, *, keep: int = 1) -> tuple[Effect, ...]:
        term = self.machine.trainer_term
        return self.apply(
            Checkpointed(trainer_term=term, lineage=Lineage(lineage), version=Version(version), keep=keep)
        )

    # --- the server ---

    def restart(self) -> Machine:
        """Return a machine restored from the stored rows, as after a crash."""
        machine = self.machine
        return Machine.restore(self.limits, machine.globals_row(), machine.rows().items(), self.now_ms)


def groups(sealed: Effect) -> tuple[int, ...]:
    """Return the members of a batch in order."""
    assert isinstance(sealed, Sealed)
    return tuple(member.group for member in sealed.members)


def seals(effects: tuple[Effect, ...]) -> list[tuple[int, tuple[int, ...]]]:
    """Return the sealed batches as (step, members in order)."""
    return [(effect.step, groups(effect)) for effect in effects if isinstance(effect, Sealed)]


def code(effects: tuple[Effect, ...]) -> Code:
    """Return the code of the only effect, a rejection."""
    (refused,) = effects
    assert isinstance(refused, Rejected)
    return refused.code


__all__ = ["Consumed", "Delivered", "Scene", "code", "groups", "seals"]
