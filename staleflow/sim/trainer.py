"""A simulated trainer: gets each batch, works for a while, publishes; requests the next batch meanwhile.

A streaming trainer gets groups of the batch as they come, and works on each for its share of the step.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

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
    Metrics,
    Refusal,
    RegisterCheckpoint,
    RegisterVersion,
    RegisterVersionReply,
    Reply,
)
from staleflow.sim.asking import Ask, Stalled, sha_of
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
    batch: Batch


class _Work(NamedTuple):
    """Groups of one step's batch, all of them or some."""

    groups: int
    batch: Batch | None
    """Set with the last groups of the batch."""
    came_s: float


class SimTrainer:
    """Trains ``steps`` steps of ``train_s`` seconds each, then reports to the scheduler that training is finished.

    ``ahead`` publishes a version when its step begins. ``stream_groups`` is the number of groups taken at once; 0:
    whole batches.
    """

    def __init__(
        self,
        timeline: Timeline,
        ask: Ask,
        *,
        steps: int,
        batch_size: int,
        train_s: float,
        checkpoint_every: int,
        ahead: bool = False,
        stream_groups: int = 0,
    ) -> None:
        self.worker = WorkerId("trainer")
        self.trained: list[Trained] = []
        self.began_s = 0.0
        """Time at which version 0 was published."""
        self._timeline = timeline
        self._ask = ask
        self._steps = steps
        self._train_s = train_s
        self._batch_size = batch_size
        self._checkpoint_every = checkpoint_every
        self._ahead = ahead
        self._stream_groups = stream_groups
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
        self.began_s = self._timeline.now_s
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
        self._asking = False
        match reply:
            case Claims():
                self._received = [*self._received, *(member.lease for member in reply.members)]
                self._waiting.append(_Work(len(reply.members), None, self._timeline.now_s))
            case Batch():
                self._waiting.append(_Work(len(reply.members) - len(self._received), reply, self._timeline.now_s))
                self._step, self._received = Step(self._step + 1), []
            case _ if self._stopped:
                return
            case _:
                assert isinstance(reply, Refusal), reply
                if reply.code is Code.DENIED:  # the scheduler has given up the run
                    raise Stalled(reply.detail)
                assert reply.code is Code.BUSY, reply
                return self._feed()
        if self._working and self._stream_groups:
            self._feed()
        return self._work()

    def _work(self) -> None:
        """Train the waiting groups unless others are being trained; request the next ones."""
        if self._working or not self._waiting:
            return
        work = self._waiting.popleft()
        self._working = True
        began_s = self._timeline.now_s if self._began_s is None else self._began_s
        self._began_s = began_s
        train_s, batch = self._train_s * (work.groups / self._batch_size), work.batch
        if batch is None:
            self._timeline.after(train_s, self._trained_some)
        elif self._ahead:
            end_s = began_s + train_s
            self._finish_step(
                batch, lambda: self._timeline.at(end_s, lambda: self._trained(batch, work.came_s, began_s))
            )
            return
        else:
            self._timeline.after(
                train_s, lambda: self._finish_step(batch, lambda: self._trained(batch, work.came_s, began_s))
            )
        self._feed()

    def _trained_some(self) -> None:
        if not self._stopped:
            self._working = False
            self._work()

    def _finish_step(self, batch: Batch, published: Callable[[], None]) -> None:
        """Publish the weights after a batch."""
        if not self._stopped:
            self._publish(Version(batch.step + 1), batch.batch, published)

    def _trained(self, batch: Batch, delivered_s: float, began_s: float) -> None:
        if self._stopped:
            return
        now_s = self._timeline.now_s
        self.trained.append(
            Trained(step=batch.step, delivered_s=delivered_s, began_s=began_s, ended_s=now_s, batch=batch)
        )
        self._working, self._began_s = False, None
        waited_s = now_s - self._before_s() - self._train_s
        values = {"time/train": self._train_s, "time/wait_for_batch": waited_s}
        self._ask(Metrics(worker=self.worker, step=batch.step, values=values))
        version = Version(batch.step + 1)
        if version % self._checkpoint_every == 0 or self.done:
            kept = RegisterCheckpoint(trainer_term=self._term, lineage=self._lineage, version=version)
            self._ask(kept)
        if self.done:
            self._ask(Finished(trainer_term=self._term))
        elif self._ahead:
            self._feed()
        else:
            self._work()

    def _before_s(self) -> float:
        """Return the time at which the trainer became free before the last trained step."""
        return self.trained[-2].ended_s if len(self.trained) > 1 else self.began_s

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
