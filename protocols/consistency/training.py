"""Trainer handlers: publish, join, claim, deliver, consume, checkpoint. The trainer term fences all but the join."""

from staleflow.protocols.consistency.effects import (
    CheckpointKept,
    Claimed,
    Code,
    Consumed,
    Delivered,
    Joined,
    Published,
)
from staleflow.protocols.consistency.events import Checkpointed, Claim, Consume, Deliver, Join, Publish
from staleflow.protocols.consistency.groups import Group, State
from staleflow.protocols.consistency.ids import Step, TrainerTerm, Version
from staleflow.protocols.consistency.ledger import STEP_ROWS, Ledger
from staleflow.protocols.consistency.production import retire_oldest
from staleflow.protocols.consistency.rollback import roll_back

MAX_CHECKPOINTS = 16
"""Maximum number of registered checkpoints. More are not needed to survive a damaged one, and each commit of the ledger
stores their numbers."""


def _fenced(ledger: Ledger, op: str, term: TrainerTerm) -> bool:
    if term == ledger.trainer_term and term > 0:
        return False
    ledger.refuse(op, Code.FENCED, f"trainer term {term}; the current one is {ledger.trainer_term}")
    return True


def _publish(ledger: Ledger, version: int, term: TrainerTerm, sha: str, nbytes: int) -> None:
    ledger.window.version = Version(version)
    ledger.newest_sha = sha
    lineage = ledger.lineages.of(version)
    ledger.out.append(Published(lineage=lineage, version=Version(version), sha=sha, nbytes=nbytes, trainer_term=term))


def publish(ledger: Ledger, event: Publish) -> None:
    if _fenced(ledger, "publish", event.trainer_term):
        return
    if ledger.window.version >= 0:
        code = Code.DUPLICATE if event.sha == ledger.first_sha else Code.CONFLICT
        return ledger.refuse("publish", code, f"version 0 was published as {ledger.first_sha}")
    ledger.first_sha = event.sha
    return _publish(ledger, 0, event.trainer_term, event.sha, event.nbytes)


def join(ledger: Ledger, event: Join) -> None:
    newest = ledger.window.version
    origin = (event.lineage, event.version)
    now = max(newest, Version(0))
    # A repeat of the last join (its reply was lost) must not fence its own trainer. Once a newer version is published,
    # the same join is a rollback.
    if event.version == now and event.trainer == ledger.trainer and origin == ledger.joined_with:
        return ledger.refuse("join", Code.DUPLICATE, f"trainer term {ledger.trainer_term}", worker=event.trainer)
    if not ledger.floor <= event.version <= now or not ledger.lineages.survives(*origin):
        detail = (
            f"version {event.version} of lineage {event.lineage}; the oldest checkpoint is {ledger.floor}, the newest "
            f"version {now}"
        )
        return ledger.refuse("join", Code.BAD_VERSION, detail, worker=event.trainer)
    ledger.trainer = event.trainer
    ledger.trainer_term = TrainerTerm(ledger.trainer_term + 1)
    ledger.joined_with = origin
    ledger.out.append(
        Joined(trainer=event.trainer, trainer_term=ledger.trainer_term, lineage=event.lineage, version=event.version)
    )
    if event.version < newest:
        roll_back(ledger, event.version)
    return None


def claim(ledger: Ledger, event: Claim) -> None:
    if _fenced(ledger, "claim", event.trainer_term):
        return
    group, window = ledger.groups.get(event.group), ledger.window
    if group is None:
        return ledger.refuse("claim", Code.STALE, group=event.group)
    if group.claim >= 0 and event.step == window.step:
        return ledger.refuse("claim", Code.DUPLICATE, group=event.group)
    if group.state in (State.SEALED, State.CONSUMED):
        code = Code.DUPLICATE if group.step == event.step else Code.STALE
        return ledger.refuse("claim", code, f"it is in the batch of step {group.step}", group=event.group)
    if event.step != window.step or window.ahead > 1:
        return ledger.refuse("claim", Code.STALE, f"step {event.step}; the next is {window.step}", group=event.group)
    if group is not claimable(ledger):
        return ledger.refuse(
            "claim", Code.DENIED, "it is not the next in order, or a step is pinned", group=event.group
        )
    ledger.claim(group)
    ledger.out.append(Claimed(group=event.group, step=event.step))
    return None


def claimable(ledger: Ledger) -> Group | None:
    """Return the occupied group that a streaming trainer may claim now."""
    group = ledger.window.first() if ledger.window.ahead <= 1 else None
    if group is None or not ledger.window.may_claim(group.deadline):
        return None
    return group


def deliver(ledger: Ledger, event: Deliver) -> None:
    if _fenced(ledger, "deliver", event.trainer_term):
        return
    steps = range(max(ledger.window.version, 0), ledger.window.step)
    batch = next((b for step in steps if (b := ledger.batches[Step(step)]).sealed.batch == event.batch), None)
    if batch is None:
        return ledger.refuse("deliver", Code.STALE, f"batch {event.batch} is not sealed")
    key = (event.batch, event.rank)
    ledger.attempts[key] = attempt = ledger.attempts.get(key, 0) + 1
    ledger.out.append(
        Delivered(
            batch=event.batch,
            lineage=batch.sealed.lineage,
            step=batch.sealed.step,
            attempt=attempt,
            trainer_term=event.trainer_term,
            rank=event.rank,
        )
    )
    return None


def consume(ledger: Ledger, event: Consume) -> None:
    if _fenced(ledger, "consume", event.trainer_term):
        return
    if event.batch == ledger.consumed_batch:
        code = Code.DUPLICATE if event.sha == ledger.newest_sha else Code.CONFLICT
        return ledger.refuse("consume", code, f"batch {event.batch} was consumed as {ledger.newest_sha}")
    step = ledger.window.version
    batch = ledger.batches.get(event.step)
    if batch is None or batch.sealed.batch != event.batch or batch.consumed:
        detail = f"batch {event.batch} is not the sealed batch of step {event.step}"
        return ledger.refuse("consume", Code.BAD_VERSION, detail)
    if event.step > step:
        return ledger.refuse("consume", Code.BAD_VERSION, f"step {event.step}; the next is {step}")
    batch.consumed = True
    ledger.consume(batch.groups)
    ledger.dirty[STEP_ROWS + event.step] = None
    ledger.forget_attempts(event.batch)
    ledger.consumed_batch = event.batch
    ledger.out.append(
        Consumed(batch=event.batch, lineage=batch.sealed.lineage, step=event.step, trainer_term=event.trainer_term)
    )
    return _publish(ledger, event.step + 1, event.trainer_term, event.sha, event.nbytes)


def checkpointed(ledger: Ledger, event: Checkpointed) -> None:
    if _fenced(ledger, "checkpoint", event.trainer_term):
        return
    if event.keep < 1:
        return ledger.refuse("checkpoint", Code.MALFORMED, f"keep is {event.keep}; at least one checkpoint is kept")
    last, newest = ledger.checkpoints[-1], ledger.window.version
    if not last <= event.version <= newest or not ledger.lineages.survives(event.lineage, event.version):
        detail = f"version {event.version} of lineage {event.lineage}; it must lie in {last} to {newest}"
        return ledger.refuse("checkpoint", Code.BAD_VERSION, detail)
    older = [version for version in ledger.checkpoints if version < event.version]
    checkpoints = [*older, event.version][-min(event.keep, MAX_CHECKPOINTS) :]
    if checkpoints == ledger.checkpoints:
        return ledger.refuse("checkpoint", Code.DUPLICATE)
    ledger.checkpoints = checkpoints
    retire_oldest(ledger)
    lineage = ledger.lineages.of(ledger.floor)
    ledger.out.append(CheckpointKept(lineage=lineage, version=ledger.floor, trainer_term=event.trainer_term))
    return None
