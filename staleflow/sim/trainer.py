"""A simulated trainer: takes each batch, works for a while, publishes; asks for the next batch meanwhile."""

from collections.abc import Callable
from dataclasses import dataclass

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import BatchId, Lineage, Step, TrainerTerm, Version, WorkerId
from staleflow.protocols.wire.messages import (
    Attach,
    Batch,
    Finished,
    Join,
    Joined,
    Metrics,
    NextBatch,
    Refusal,
    RegisterCheckpoint,
    Registered,
    RegisterVersion,
    Reply,
)
from staleflow.sim.asking import Ask, sha_of
from staleflow.sim.timeline import Timeline

WAIT_MS = 60_000
BYTES = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One step, in seconds of virtual time."""

    step: Step
    delivered_s: float
    """Its batch arrived."""
    began_s: float
    ended_s: float
    """Its version was published."""
    batch: Batch


class SimTrainer:
    """Trains ``steps`` steps of ``train_s`` seconds each, then tells the run that it is over.

    ``ahead``: a version is published when its step begins.
    """

    def __init__(
        self, timeline: Timeline, ask: Ask, *, steps: int, train_s: float, checkpoint_every: int, ahead: bool = False
    ) -> None:
        self.worker = WorkerId("trainer")
        self.trained: list[Trained] = []
        self.began_s = 0.0
        """When version 0 was out."""
        self._timeline = timeline
        self._ask = ask
        self._steps = steps
        self._train_s = train_s
        self._checkpoint_every = checkpoint_every
        self._ahead = ahead
        self._term = TrainerTerm(0)
        self._lineage = Lineage(0)
        self._next: tuple[float, Batch] | None = None
        self._working = False
        self._stopped = False

    @property
    def done(self) -> bool:
        """Whether the last step is trained, or will never be."""
        return self._stopped or len(self.trained) >= self._steps

    def stop(self) -> None:
        """Train no more: the run is over."""
        if not self.done:
            self._stopped = True
            self._ask(Finished(trainer_term=self._term))

    def attach(self) -> None:
        """Join the run and publish version 0."""
        self._ask(Attach(worker=self.worker, name="trainer", role="trainer"))
        self._ask(Join(trainer=self.worker, lineage=Lineage(0), version=Version(0)), self._joined)

    def _joined(self, reply: Reply) -> None:
        assert isinstance(reply, Joined), reply
        self._term, self._lineage = reply.trainer_term, reply.lineage
        self._publish(Version(0), None, self._begin)

    def _begin(self) -> None:
        self.began_s = self._timeline.now_s
        self._want(Step(0))

    def _want(self, step: Step) -> None:
        if step < self._steps:
            self._ask(NextBatch(trainer_term=self._term, step=step, wait_ms=WAIT_MS), lambda r: self._came(step, r))

    def _came(self, step: Step, reply: Reply) -> None:
        if isinstance(reply, Batch):
            self._next = (self._timeline.now_s, reply)
            self._work()
        elif not self._stopped:
            assert isinstance(reply, Refusal), reply
            assert reply.code is Code.BUSY, reply
            self._want(step)

    def _work(self) -> None:
        """Begin with the batch that is there, unless one is being trained; ask for the one after it."""
        if self._working or self._next is None:
            return
        delivered_s, batch = self._next
        self._next, self._working = None, True
        began_s = self._timeline.now_s
        if self._ahead:
            over_s = began_s + self._train_s
            self._over(batch, lambda: self._timeline.at(over_s, lambda: self._trained(batch, delivered_s, began_s)))
        else:
            self._timeline.after(
                self._train_s, lambda: self._over(batch, lambda: self._trained(batch, delivered_s, began_s))
            )
            self._want(Step(batch.step + 1))

    def _over(self, batch: Batch, published: Callable[[], None]) -> None:
        """Publish what a batch made of the weights."""
        if not self._stopped:
            self._publish(Version(batch.step + 1), batch.batch, published)

    def _trained(self, batch: Batch, delivered_s: float, began_s: float) -> None:
        if self._stopped:
            return
        now_s = self._timeline.now_s
        self.trained.append(
            Trained(step=batch.step, delivered_s=delivered_s, began_s=began_s, ended_s=now_s, batch=batch)
        )
        self._working = False
        values = {"time/train": now_s - began_s, "time/wait_for_batch": began_s - self._before_s()}
        self._ask(Metrics(worker=self.worker, step=batch.step, values=values))
        version = Version(batch.step + 1)
        if version % self._checkpoint_every == 0 or self.done:
            kept = RegisterCheckpoint(trainer_term=self._term, lineage=self._lineage, version=version)
            self._ask(kept)
        if self.done:
            self._ask(Finished(trainer_term=self._term))
        elif self._ahead:
            self._want(Step(batch.step + 1))
        else:
            self._work()

    def _before_s(self) -> float:
        """When the trainer was last free before the step trained last."""
        return self.trained[-2].ended_s if len(self.trained) > 1 else self.began_s

    def _publish(self, version: Version, batch: BatchId | None, published: Callable[[], None]) -> None:
        message = RegisterVersion(
            trainer_term=self._term,
            lineage=self._lineage,
            version=version,
            batch=batch,
            sha=sha_of(self._lineage, version),
            nbytes=BYTES,
        )

        def answered(reply: Reply) -> None:
            assert isinstance(reply, Registered), reply
            published()

        self._ask(message, answered)
