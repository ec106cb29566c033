"""A simulated trainer: gets each batch, works for a while, publishes; requests the next batch meanwhile.

A streaming trainer gets groups of the batch as they come, and works on each for its share of the step. With a cost of
publishing, a version is published while the next step trains (``trainer.overlap_publish``), which waits before it
changes the weights.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import BatchId, LeaseId, Lineage, Step, TrainerTerm, Version, WorkerId
from staleflow.protocols.wire.messages import (
    Attach,
    Batch,
    Claims,
    Finished,
    GetBatch,
    GetClaims,
    Join,
    JoinReply,
    MemberRef,
    Metrics,
    Refusal,
    RegisterCheckpoint,
    RegisterVersion,
    RegisterVersionReply,
    Reply,
)
from staleflow.sim.asking import Ask, Stalled, sha_of
from staleflow.sim.charges import Charges
from staleflow.sim.timeline import Timeline

WAIT_TIMEOUT_MS = 60_000
VERSION_BYTES = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One step, in seconds of virtual time."""

    step: Step
    delivered_s: float
    """Time at which its batch arrived."""
    began_s: float
    ended_s: float
    """Time at which its version was published."""
    train_s: float
    """Seconds of training."""
    batch: Batch


class Payload(Protocol):
    """The payload of groups, at the trajectory servers."""

    def tokens(self, members: Sequence[MemberRef]) -> int:
        """Return the number of tokens of groups, prompts included."""
        ...

    def fetch(self, members: Sequence[MemberRef], done: Callable[[], None]) -> None:
        """Fetch groups, then call ``done``; at once if that takes no time."""
        ...


class _Work(NamedTuple):
    """Groups of one step's batch, all of them or some."""

    members: Sequence[MemberRef]
    batch: Batch | None
    """Set with the last groups of the batch."""
    came_s: float


class SimTrainer:
    """Trains the steps of the configuration, then reports to the scheduler that training is finished."""

    def __init__(self, timeline: Timeline, ask: Ask, charges: Charges, payload: Payload) -> None:
        config = charges.config
        self.worker = WorkerId("trainer")
        self.trained: list[Trained] = []
        self.began_s = 0.0
        """Time at which version 0 was published."""
        self._timeline = timeline
        self._ask = ask
        self._charges = charges
        self._payload = payload
        self._steps = config.trainer.steps
        self._checkpoint_every = config.trainer.checkpoint_every
        self._ahead = config.simulation.publish == "start"
        """A version is published when its step begins."""
        self._overlaps = charges.publish_s() > 0 and config.trainer.overlap_publish and not self._ahead
        self._stream_groups = config.trainer.stream_groups if config.trainer.streaming else 0
        """Number of groups taken at once; 0: whole batches."""
        self._term = TrainerTerm(0)
        self._lineage = Lineage(0)
        self._step = Step(0)
        """The step whose groups are requested next."""
        self._received: list[LeaseId] = []
        """Leases already received of that step."""
        self._asking = False
        self._waiting: deque[_Work] = deque()
        self._working = False
        self._began_s: float | None = None
        """Time at which the current step began."""
        self._train_s = 0.0
        """Seconds trained of the current step, as far as its groups are known."""
        self._free_s = 0.0
        """Time at which the trainer became free for the current step."""
        self._publishing = False
        """True while a version is published beside a step."""
        self._update: Callable[[], None] | None = None
        """Continues a step that waits for that version before it changes the weights."""
        self._stopped = False

    @property
    def done(self) -> bool:
        """True if the last step is trained, or will never be."""
        return self._stopped or len(self.trained) >= self._steps

    def stop(self) -> None:
        """Stop training: the run is over."""
        if not self.done:
            self._stopped = True
            self._ask(Finished(trainer_term=self._term))

    def attach(self) -> None:
        """Attach to the run and publish version 0."""
        self._ask(Attach(worker=self.worker, name="trainer", role="trainer"))
        self._ask(Join(trainer=self.worker, lineage=Lineage(0), version=Version(0)), self._on_joined)

    def _on_joined(self, reply: Reply) -> None:
        assert isinstance(reply, JoinReply), reply
        self._term, self._lineage = reply.trainer_term, reply.lineage
        self._publish(Version(0), None, self._begin)

    def _begin(self) -> None:
        self.began_s = self._free_s = self._timeline.now_s
        self._feed()

    def _feed(self) -> None:
        """Request the next groups: whole batches one ahead, micro-batches two."""
        if self._asking or self._step >= self._steps or len(self._waiting) >= (2 if self._stream_groups else 1):
            return
        self._asking = True
        if self._stream_groups:
            ask: GetBatch | GetClaims = GetClaims(
                trainer_term=self._term,
                step=self._step,
                held=self._received,
                count=self._stream_groups,
                wait_ms=WAIT_TIMEOUT_MS,
            )
        else:
            ask = GetBatch(trainer_term=self._term, step=self._step, wait_ms=WAIT_TIMEOUT_MS)
        self._ask(ask, self._on_groups)

    def _on_groups(self, reply: Reply) -> None:
        match reply:
            case Claims():
                work = _Work(reply.members, None, self._timeline.now_s)
                self._received = [*self._received, *(member.lease for member in reply.members)]
            case Batch():
                received = set(self._received)
                members = [member for member in reply.members if member.lease not in received]
                work = _Work(members, reply, self._timeline.now_s)
                self._step, self._received = Step(self._step + 1), []
            case _ if self._stopped:
                self._asking = False
                return
            case _:
                self._asking = False
                assert isinstance(reply, Refusal), reply
                if reply.code is Code.DENIED:  # the scheduler has given up the run
                    raise Stalled(reply.detail)
                assert reply.code is Code.BUSY, reply
                return self._feed()
        return self._payload.fetch(work.members, partial(self._on_fetched, work))

    def _on_fetched(self, work: _Work) -> None:
        self._asking = False
        self._waiting.append(work)
        if self._working and self._stream_groups:
            self._feed()
        self._work()

    def _work(self) -> None:
        """Train the waiting groups unless others are being trained; request the next ones."""
        if self._working or not self._waiting:
            return
        work = self._waiting.popleft()
        self._working = True
        began_s = self._timeline.now_s if self._began_s is None else self._began_s
        self._began_s = began_s
        batch, tokens = work.batch, self._payload.tokens(work.members)
        train_s = self._charges.train_s(len(work.members), tokens, last=batch is not None)
        self._train_s += train_s
        if batch is None:
            self._timeline.after(train_s, self._trained_some)
        elif self._ahead:
            end_s, self._train_s = began_s + train_s, 0.0
            ended = partial(self._trained, batch, work.came_s, began_s, train_s)
            self._finish_step(batch, lambda: self._timeline.at(end_s, ended))
            return
        else:
            self._timeline.after(train_s, self._change_weights, batch, work.came_s, began_s)
        self._feed()

    def _trained_some(self) -> None:
        if not self._stopped:
            self._working = False
            self._work()

    def _change_weights(self, batch: Batch, came_s: float, began_s: float) -> None:
        """End the computation of a step: its weights change, once the version before is published."""
        if self._publishing:
            self._update = partial(self._change_weights, batch, came_s, began_s)
            return
        publish_s, train_s, self._train_s = self._charges.publish_s(), self._train_s, 0.0
        ended = partial(self._trained, batch, came_s, began_s, train_s)
        if self._overlaps:
            self._publishing = True
            self._report_step(batch.step, train_s)
            checkpoint_s = self._charges.checkpoint_s() if self._is_kept(Version(batch.step + 1)) else 0.0
            self._later(self._charges.between_s() + checkpoint_s, self._train_beside)
        self._later(publish_s, partial(self._finish_step, batch, ended))

    def _train_beside(self) -> None:
        """Train the next step while a version is published."""
        self._working, self._began_s = False, None
        if not self._waiting and self._publishing and self._step < self._steps and not self._stream_groups:
            # The outstanding request prefetches. This one is only for the scheduler to know that the trainer waits.
            request = GetBatch(trainer_term=self._term, step=self._step, wait_ms=WAIT_TIMEOUT_MS, waiting=True)
            self._ask(request)
        self._work()

    def _finish_step(self, batch: Batch, published: Callable[[], None]) -> None:
        """Publish the weights after a batch."""
        if not self._stopped:
            self._publish(Version(batch.step + 1), batch.batch, published)

    def _trained(self, batch: Batch, delivered_s: float, began_s: float, train_s: float) -> None:
        """End a step: its version is published."""
        if self._stopped:
            return
        if not self._overlaps:
            self._report_step(batch.step, train_s)
        self._publishing = False
        row = Trained(
            step=batch.step,
            delivered_s=delivered_s,
            began_s=began_s,
            ended_s=self._timeline.now_s,
            train_s=train_s,
            batch=batch,
        )
        self.trained.append(row)
        version = Version(batch.step + 1)
        if self._is_kept(version):
            self._keep(version)
        else:
            self._end_step()

    def _report_step(self, step: Step, train_s: float) -> None:
        """Report the times of a step when the trainer becomes free of it."""
        now_s = self._timeline.now_s
        publish_s = 0.0 if self._overlaps else self._charges.publish_s()
        values = {"time/train": train_s, "time/wait_for_batch": now_s - self._free_s - train_s - publish_s}
        self._free_s = now_s
        self._ask(Metrics(worker=self.worker, step=step, values=values))

    def _is_kept(self, version: Version) -> bool:
        """Return whether a checkpoint of the version is written."""
        return version % self._checkpoint_every == 0 or version >= self._steps

    def _keep(self, version: Version) -> None:
        """Write a checkpoint; the run ends only after the last one."""
        waits = self.done or (self._charges.checkpoint_s() > 0 and not self._overlaps)

        def written() -> None:
            self._ask(RegisterCheckpoint(trainer_term=self._term, lineage=self._lineage, version=version))
            if waits:
                self._end_step()

        self._later(self._charges.written_s(), written)
        if not waits:
            self._end_step()

    def _end_step(self) -> None:
        """Continue after a step and its checkpoint."""
        if self._overlaps or self._ahead or self.done:
            self._continue()
        else:
            self._later(self._charges.between_s(), self._continue)

    def _continue(self) -> None:
        if not self._overlaps:
            self._working, self._began_s = False, None
        if self.done:
            self._ask(Finished(trainer_term=self._term))
        elif self._ahead:
            self._feed()
        elif self._update is not None:
            update, self._update = self._update, None
            update()
        elif not self._overlaps:
            self._work()

    def _later(self, delay_s: float, callback: Callable[[], None]) -> None:
        if delay_s:
            self._timeline.after(delay_s, callback)
        else:
            callback()

    def _publish(self, version: Version, batch: BatchId | None, published: Callable[[], None]) -> None:
        message = RegisterVersion(
            trainer_term=self._term,
            lineage=self._lineage,
            version=version,
            batch=batch,
            sha=sha_of(self._lineage, version),
            nbytes=VERSION_BYTES,
        )

        def answered(reply: Reply) -> None:
            assert isinstance(reply, RegisterVersionReply), reply
            published()

        self._ask(message, answered)
