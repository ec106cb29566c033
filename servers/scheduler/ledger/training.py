"""Requests of the trainer: join, wait for a sealed batch, register versions and checkpoints, finish.

A ``GetBatch`` waits here until the ledger has sealed its step, so trainers do not poll. On timeout it is refused with a
sentence that explains what the step waits for. A ``GetClaims`` needs no sealed batch: groups are claimed for it as they
become ready, which fixes them as the first members of the batch, until it has the requested number.
"""

import logging
from collections.abc import Callable
from functools import cache

import msgspec

from staleflow.net.endpoint import Call
from staleflow.protocols.consistency import effects, events
from staleflow.protocols.consistency.effects import Code, Consumed, Delivered, Effect, Member, Rejected, Sealed
from staleflow.protocols.consistency.groups import GroupView, State
from staleflow.protocols.consistency.ids import Step, TrainerTerm, Version
from staleflow.protocols.consistency.limits import Bound, Limits
from staleflow.protocols.wire.messages import (
    Batch,
    CheckBatch,
    Claims,
    Done,
    GetBatch,
    GetClaims,
    Join,
    JoinReply,
    MemberRef,
    NoMoreBatches,
    QuarantineGroups,
    RegisterCheckpoint,
    RegisterCheckpointReply,
    RegisterVersion,
    RegisterVersionReply,
)
from staleflow.servers.scheduler.ledger.interpreter import Interpreter
from staleflow.servers.scheduler.ledger.model_limits import CurrentModelLimits
from staleflow.servers.scheduler.ledger.pending_replies import PendingReplies
from staleflow.servers.scheduler.ledger.rejects import Rejects
from staleflow.servers.scheduler.long_polls import LongPolls

log = logging.getLogger(__name__)

REMEMBERED_JOINS = 64
"""Connections whose last join is stored, to recognize a resent request."""
MIN_UNTRAINABLE = 8
"""Untrainable groups in a row that are always allowed, even with smaller batches."""
MAX_WHY_CHARS = 500
"""Maximum length of the reason for untrainable groups: it is logged and displayed."""
_JOINS = b"joins"


class JoinRequest(msgspec.Struct, frozen=True, array_like=True):
    """The request that started a trainer term."""

    id: int
    term: TrainerTerm


class Training:
    """Handles the requests of the trainer."""

    def __init__(
        self,
        interpreter: Interpreter,
        replies: PendingReplies,
        rejects: Rejects,
        steps: int,
        model_limits: CurrentModelLimits,
    ) -> None:
        self._interpreter = interpreter
        self._replies = replies
        self._rejects = rejects
        self._waiting = LongPolls[GetBatch | GetClaims](interpreter.clock.now_ms)
        """Calls of ranks that wait for the batch of a step, or for groups of it."""
        self._sealed = False
        self._end = steps
        self._model_limits = model_limits
        self._untrainable = 0
        """Groups that the trainer could not train since its last trained step."""
        interpreter.listen(Sealed, self._on_sealed)
        interpreter.listen(Consumed, self._on_consumed)
        with interpreter.store.read() as txn:
            raw = txn.get("meta", _JOINS)
        self._joins = {} if raw is None else msgspec.msgpack.decode(raw, type=dict[str, JoinRequest])
        """The newest join of each connection."""

    def end_step(self) -> int:
        """Return the end of the run, exclusive: ``trainer.steps``, or more if the trainer has requested later steps."""
        return self._end

    @property
    def has_waiting(self) -> bool:
        """True if any rank is waiting for a batch."""
        return bool(self._waiting)

    def waiting_step(self) -> Step | None:
        """Return the step that the trainer waits for: its current one, or the one after it while it is publishing.

        Another request for a later step is prefetch.
        """
        step = Step(self._interpreter.machine.version)
        if any(body.step == step for body in self._waiting):
            return step
        ahead = Step(step + 1)
        waits = any(isinstance(body, GetBatch) and body.waiting and body.step == ahead for body in self._waiting)
        return ahead if waits else None

    def is_trainer_waiting(self) -> bool:
        """Return whether the trainer waits for its current step."""
        return self.waiting_step() == Step(self._interpreter.machine.version)

    def join(self, call: Call, body: Join) -> None:
        machine = self._interpreter.machine
        previous = self._joins.get(call.route)
        if previous is not None and call.id <= previous.id and previous.term <= machine.trainer_term:
            moved_on = previous.term < machine.trainer_term or body.version < machine.version
            if call.id < previous.id or moved_on:  # a stale duplicate: its sender has its reply or was fenced
                self._fenced(call, previous.term)
                return
        event = events.Join(trainer=body.trainer, lineage=body.lineage, version=body.version)
        outcome = self._interpreter.apply(event)
        if self._refuse(call, outcome):
            return
        machine = self._interpreter.machine
        self._remember(call, machine.trainer_term)
        self._model_limits.update(body.model)
        reply = JoinReply(trainer_term=machine.trainer_term, lineage=machine.lineage, version=machine.version)
        self._replies.add(call, reply)
        self._sealed = True

    def _remember(self, call: Call, term: TrainerTerm) -> None:
        """Store which request started the term, so that a late duplicate of it does not start another term."""
        self._joins.pop(call.route, None)
        self._joins[call.route] = JoinRequest(call.id, term)
        while len(self._joins) > REMEMBERED_JOINS:
            del self._joins[next(iter(self._joins))]
        self._interpreter.with_commit(lambda txn: txn.put("meta", _JOINS, msgspec.msgpack.encode(self._joins)))

    def next_batch(self, call: Call, body: GetBatch | GetClaims) -> None:
        """Queue a request for a batch or for claims; ``deliver`` or ``answer_due`` replies to it."""
        machine = self._interpreter.machine
        if body.trainer_term != machine.trainer_term:
            self._fenced(call, body.trainer_term)
            return
        if body.step < machine.version:
            self._replies.refuse(
                call, Code.STALE, f"step {body.step} is consumed; version {machine.version} is published"
            )
            return
        self._waiting.add(call, body)
        self._end = max(self._end, body.step + 1)
        self._sealed = True

    def check_batch(self, call: Call, body: CheckBatch) -> None:
        if not self.current(call, body.trainer_term):
            return
        sealed = self._interpreter.machine.sealed_batch(body.step)
        if sealed is not None and sealed.batch == body.batch:
            self._replies.add(call, Done())
        else:
            self._replies.refuse(call, Code.CONFLICT, f"batch {body.batch} is not the sealed batch of step {body.step}")

    def quarantine(self, call: Call, body: QuarantineGroups) -> None:
        """Quarantine groups of a batch that cannot be trained; refuse with ``DENIED`` if too many fail in a row."""
        if not self.current(call, body.trainer_term):
            return
        machine = self._interpreter.machine
        groups = [group for group in dict.fromkeys(body.groups) if _in_batch(machine.group(group))]
        limit, why = max(self._interpreter.limits.batch_size, MIN_UNTRAINABLE), body.why[:MAX_WHY_CHARS]
        self._untrainable += len(groups)
        if self._untrainable > limit:
            failure = f"{self._untrainable} groups in a row cannot be trained, more than {limit}"
            detail = f"{failure}: the model, the algorithm or the engines are at fault, not single groups. Last: {why}"
            self._replies.refuse(call, Code.DENIED, detail)
            return
        for group in groups:
            log.error("group %d quarantined: the trainer cannot train it: %s", group, why)
            self._interpreter.apply(events.Quarantine(group=group))
        self._sealed = True
        self._replies.add(call, Done())

    def deliver(self) -> None:
        """Reply to the calls whose batch is sealed or whose groups can be claimed; refuse fenced callers."""
        if self._sealed or any(isinstance(body, GetClaims) for body in self._waiting):
            self._sealed = False
            self._waiting.settle(self._deliver)

    def _deliver(self, call: Call, body: GetBatch | GetClaims) -> bool:
        machine = self._interpreter.machine
        if body.trainer_term != machine.trainer_term:
            self._fenced(call, body.trainer_term)
        elif isinstance(body, GetClaims) and self._handle_claims(call, body):
            pass
        elif (sealed := machine.sealed_batch(body.step)) is not None:
            self._deliver_batch(call, body, sealed)
        else:
            return False
        return True

    def _handle_claims(self, call: Call, body: GetClaims) -> bool:
        """Claim groups for a ``GetClaims``.

        Return True if the call was handled. Return False if it must wait, or if the step is sealed and ``deliver``
        replies with the batch.
        """
        machine, num_held = self._interpreter.machine, len(body.held)
        turn = body.step == machine.next_step
        if machine.sealed_batch(body.step) is not None or (
            machine.num_claimed == num_held and turn and machine.claimable() is None
        ):
            return False
        members = machine.claims() if turn else ()
        if [member.lease for member in members[:num_held]] != body.held:
            self._replies.refuse(call, Code.CONFLICT, f"step {body.step} no longer starts with the claimed groups")
            return True
        wanted = num_held + body.count
        while turn and machine.num_claimed < wanted and (group := machine.claimable()) is not None:
            self._interpreter.apply(events.Claim(group=group, step=body.step, trainer_term=body.trainer_term))
            turn = body.step == machine.next_step  # claiming the last group of a batch seals it
        if not turn or machine.num_claimed < wanted:
            return False
        members = machine.claims()
        some = [_ref(member) for member in members[num_held:wanted]]
        limits, lineage = self._interpreter.limits, machine.lineage
        self._replies.add(
            call, Claims(lineage=lineage, step=body.step, members=some, mask_below=_mask_below(limits, body.step))
        )
        return True

    def _deliver_batch(self, call: Call, body: GetBatch | GetClaims, sealed: Sealed) -> None:
        outcome = self._interpreter.apply(
            events.Deliver(batch=sealed.batch, trainer_term=body.trainer_term, rank=body.rank)
        )
        if self._refuse(call, outcome):
            return
        delivered = next(effect for effect in outcome if isinstance(effect, Delivered))
        self._replies.add(call, self._batch(sealed, delivered.attempt))

    def _batch(self, sealed: Sealed, attempt: int) -> Batch:
        return Batch(
            batch=sealed.batch,
            lineage=sealed.lineage,
            step=sealed.step,
            attempt=attempt,
            members=[_ref(member) for member in sealed.members],
            digest=sealed.digest,
            mask_below=_mask_below(self._interpreter.limits, sealed.step),
        )

    def answer_due(self, now: int, why: Callable[[], str]) -> None:
        """Refuse the calls whose wait time has passed. ``why`` returns the reason why their step waits."""
        reason = cache(why)  # built at most once for all ranks; they request the batch again at once
        self._waiting.end(lambda call: call.refuse(Code.BUSY, reason(), retry_after_ms=1), now)

    def end(self, why: str) -> None:
        """Reply ``NoMoreBatches`` to the trainer if its step is not sealed although no group is in flight.

        A step further ahead keeps waiting: it may still be sealed from occupied groups once the step before is trained.
        """
        machine = self._interpreter.machine
        if machine.next_step > machine.version + 1:
            return

        def reply(call: Call, body: GetBatch | GetClaims) -> bool:
            if body.step < machine.next_step:
                return False
            self._replies.add(call, NoMoreBatches(why=why))
            return True

        self._waiting.settle(reply)

    def give_up(self, why: str) -> None:
        """Refuse all waiting calls: no further batch is possible."""
        self._waiting.end(lambda call: call.refuse(Code.DENIED, why))

    def register_version(self, call: Call, body: RegisterVersion) -> None:
        if body.batch is None and body.version != 0:
            self._accept_again(call, body)
            return
        lineage = self._interpreter.machine.lineage_of(body.version)
        if self.is_current(body.trainer_term) and body.lineage != lineage:
            detail = f"version {body.version} belongs to lineage {lineage}, not to {body.lineage}"
            self._replies.refuse(call, Code.BAD_VERSION, detail)
            return
        if body.batch is None:
            event: events.Event = events.Publish(trainer_term=body.trainer_term, sha=body.sha, nbytes=body.nbytes)
        else:
            event = events.Consume(
                batch=body.batch,
                step=Step(body.version - 1),
                trainer_term=body.trainer_term,
                sha=body.sha,
                nbytes=body.nbytes,
            )
        if not self._refuse(call, self._interpreter.apply(event)):
            self._replies.add(call, RegisterVersionReply(lineage=body.lineage, version=body.version))

    def _accept_again(self, call: Call, body: RegisterVersion) -> None:
        """Accept the newest version again, from a restarted trainer, after the parameter server has lost it."""
        if not self.current(call, body.trainer_term):
            return
        machine = self._interpreter.machine
        if (body.lineage, body.version) != (machine.lineage_of(machine.version), machine.version):
            detail = f"version {body.version} needs the batch it was trained on"
            self._replies.refuse(call, Code.BAD_VERSION, detail)
        elif machine.newest_sha not in ("", body.sha):
            detail = f"version {body.version} was published as {machine.newest_sha}"
            self._replies.refuse(call, Code.CONFLICT, detail)
        else:
            self._replies.add(call, RegisterVersionReply(lineage=body.lineage, version=body.version))

    def register_checkpoint(self, call: Call, body: RegisterCheckpoint) -> None:
        """Register a checkpoint of the joined trainer. Other peers are refused: their reports could release versions
        that the trainer can resume from."""
        if not self.current(call, body.trainer_term):
            return
        trainer = self._interpreter.machine.trainer
        if call.peer != trainer:
            refused = Rejected(op=type(body).__name__, code=Code.DENIED)
            self._rejects.refused(call.peer, refused, self._interpreter.clock.now_ms())
            self._replies.refuse(call, Code.DENIED, f"{call.peer} is not the trainer, {trainer} is")
            return
        event = events.Checkpointed(
            trainer_term=body.trainer_term, lineage=body.lineage, version=body.version, keep=body.keep
        )
        if not self._refuse(call, self._interpreter.apply(event)):
            _, oldest = self._interpreter.machine.oldest_checkpoint
            self._replies.add(call, RegisterCheckpointReply(oldest=oldest))

    def current(self, call: Call, term: TrainerTerm) -> bool:
        """Return whether ``term`` is the current trainer term; otherwise refuse the call."""
        if self.is_current(term):
            return True
        self._fenced(call, term)
        return False

    def is_current(self, term: TrainerTerm) -> bool:
        return term == self._interpreter.machine.trainer_term

    def _fenced(self, call: Call, term: TrainerTerm) -> None:
        now = self._interpreter.machine.trainer_term
        detail = f"trainer term {term} is over; the current term is {now}"
        self._rejects.refused(
            call.peer, Rejected(op=type(call.body).__name__, code=Code.FENCED), self._interpreter.clock.now_ms()
        )
        self._replies.refuse(call, Code.FENCED, detail)

    def _refuse(self, call: Call, outcome: tuple[Effect, ...]) -> bool:
        """Refuse the call if the ledger rejected it. ``DUPLICATE`` counts as success."""
        for effect in outcome:
            if isinstance(effect, effects.Rejected):
                self._rejects.refused(call.peer, effect, self._interpreter.clock.now_ms())
                if effect.code is not Code.DUPLICATE:
                    self._replies.refuse(call, effect.code, effect.detail)
                    return True
        return False

    def _on_consumed(self, _: Consumed) -> None:
        self._untrainable = 0

    def _on_sealed(self, _: Sealed) -> None:
        self._sealed = True


def _in_batch(group: GroupView | None) -> bool:
    """Return whether the group is sealed, or claimed for a batch that is not sealed yet."""
    return group is not None and (group.state is State.SEALED or group.claimed)


def _ref(member: Member) -> MemberRef:
    return MemberRef(
        group=member.group,
        lease=member.lease,
        lineage=member.lineage,
        version=member.version,
        sha=member.sha,
        shard=member.shard,
        nbytes=member.nbytes,
        sequence_tokens=member.sequence_tokens,
    )


def _mask_below(limits: Limits, step: Step) -> Version:
    """Return the version below which tokens are masked (context only); -1 if every token is trained."""
    return Version(max(step - limits.max_staleness, -1) if limits.bound is Bound.TOKEN else -1)
