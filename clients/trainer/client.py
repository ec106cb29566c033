"""The trainer's side of the service, for a plain training loop::

    with TrainerClient("ipc:///path/to/run/sock/scheduler") as trainer:
        if trainer.join(lineage, version).version < 0:
            trainer.publish_initial(model.state_dict())
        for batch in trainer.batches(steps):
            ...                                  # batch.input_ids, batch.loss_mask, batch.rewards, ...
            trainer.commit(model.state_dict())   # returns when version step + 1 exists
        trainer.finished()

Calls block. The sockets run on an event loop in a separate thread, so heartbeats and the next batch continue during a
step. Every call may raise ``Fenced``: another trainer has joined, and calls of this one have no effect any more.
``join`` and ``commit`` may raise ``BadVersion``, ``batches`` and ``stream`` ``NoBatch``.

A loop that does not wait for its versions to be stored calls ``begin_commit`` in place of ``commit``, and
``before_update`` right before its optimizer changes the weights. Errors of ``commit`` are then raised by later calls.
"""

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self, TypeVar

from staleflow.clients.attachment import attach
from staleflow.clients.background import Background, Cancellable, LoopThread, within
from staleflow.clients.trainer.backends.base import Published, Stopped
from staleflow.clients.trainer.commits import STATUS_TIMEOUT_S, Commits
from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.clients.trainer.data.micro_batches import MicroBatch, MicroBatchStream
from staleflow.clients.trainer.data.prefetch import BatchStream, Drained
from staleflow.clients.trainer.errors import BadVersion, fenced, raise_refusal
from staleflow.clients.trainer.publication import Publication
from staleflow.clients.weights import Publisher, external
from staleflow.clients.weights.sharded import RankUpload, Spans
from staleflow.net.client import Client, worker_id
from staleflow.net.errors import Refused, Unavailable
from staleflow.net.permissions import Role
from staleflow.net.security import client_sockets
from staleflow.net.transport import Transport
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId, Lineage, Step, TrainerTerm, Version
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import (
    Attach,
    AttachReply,
    Batch,
    BeginPublishReply,
    Detach,
    Done,
    Finished,
    GetBatch,
    GetStatus,
    Join,
    JoinReply,
    Metrics,
    ModelLimits,
    RegisterCheckpoint,
    RegisterCheckpointReply,
    TrajectoriesStatus,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

CROWDED_FRACTION = 0.5
"""Fraction of a trajectory server's map above which consumed payload should be freed, which needs a checkpoint."""
POLL_INTERVAL_S = 5.0
"""Wait for a batch after which the newest version is checked for damage."""
MIN_WAIT_S = 0.02
"""Shortest wait for a batch that is reported to the scheduler while a version is being published."""
METRICS_TIMEOUT_S = 30.0
PUBLISH_TOTAL = "time/publish_total"
SEND_TIMEOUT_S = 1.0
"""Maximum duration of all other messages after a stop request."""


class TrainerClient:
    """One trainer of one run. Not thread-safe, except ``interrupt``."""

    def __init__(
        self,
        scheduler: str,
        *,
        name: str = "trainer",
        config_sha: str = "",
        rank: int = 0,
        world: int = 1,
        transport: Transport | None = None,
        direct: str = "",
        background: Background | None = None,
    ) -> None:
        """``transport``: contains the trainer's key. By default STALEFLOW_KEY in the environment names the key, if set.
        ``direct``: ``tcp://host:port`` (0: any) where this process serves the newest version to engines itself."""
        self.worker = worker_id(name)
        self._place = (rank, world)
        self.same: Callable[[TrainBatch], bool] = _always
        """Return whether the other ranks have the same batch; if not, it is fetched again."""
        self.share: Callable[[MicroBatch], bool] = _always
        """Return whether the other ranks have their shares of the micro-batch; if not, its step restarts."""
        self.model = ModelLimits()
        """Limits of the model, if known; set them before ``join``. Trajectory servers reject groups that exceed them,
        and such a group that is fetched anyway is quarantined."""
        self.on_wait: Callable[[], None] = lambda: None
        """Called at each ``POLL_INTERVAL_S`` spent waiting for a batch or its next groups."""
        self._name = name
        self._config_sha = config_sha
        self._thread: Background = background or LoopThread("trainer client")
        self._transport = transport or client_sockets(None, Role.TRAINER)
        self._scheduler = Client(scheduler, worker=self.worker, transport=self._transport)
        self._shards: list[Client] = []
        self._direct = direct
        self._join_reply: JoinReply | None = None
        self._commits = Commits(self._thread)
        self._reported: asyncio.Event | None = None
        """Set once the metrics that follow a publication are sent."""
        self._uncommitted: deque[TrainBatch | Batch] = deque()
        """The batches that the caller has, in the order of their steps: one, or two while it reads ahead."""
        self._void = False
        """The last batch or micro-batch contains quarantined groups."""
        self.waited_s = 0.0
        """Seconds that the trainer waited for the last batch."""
        self.run = ""
        """The run's identity, once attached."""
        self.drained = ""
        """Why ``batches`` or ``stream`` ended early if the run was drained; call ``finished`` next."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def version(self) -> Version:
        """Version of the trainer's weights, as known to the run."""
        return self._commits.version

    def attach(self) -> AttachReply:
        """Attach to the run and wait for its servers. ``join`` attaches if necessary."""
        request = Attach(
            worker=self.worker, name=self._name, role="trainer", config_sha=self._config_sha, pid=os.getpid()
        )
        attached = self._wait(attach(self._scheduler, request, parameters=True))
        self.run = attached.run
        self._shards = [Client(endpoint, worker=self.worker, transport=self._transport) for endpoint in attached.shards]
        self._commits.publisher = Publisher(
            attached.parameters, worker=self.worker, transport=self._transport, direct=self._direct
        )
        return attached

    def join(self, lineage: Lineage, version: Version) -> JoinReply:
        """Take over with the weights of (lineage, version), (0, 0) being the initial model. Older trainers are fenced.

        From an older version, the run rolls back to it. The reply's version is -1 while nothing is published; call
        ``publish_initial`` next. ``BadVersion`` if the run cannot continue from there.
        """
        self._commits.forget()
        if self._commits.publisher is None:
            self.attach()
        request = Join(trainer=self.worker, lineage=lineage, version=version, model=self.model)
        try:
            self._join_reply = self._wait(self._scheduler.ask(request, JoinReply, timeout_s=None))
        except Refused as refused:
            if refused.code is Code.BAD_VERSION:
                raise BadVersion(f"version {version} of lineage {lineage}: {refused.detail}") from refused
            raise
        self._commits.joined(lineage, version)
        return self._join_reply

    def publish_initial(self, weights: Mapping[str, Any] | Published) -> None:
        """Publish version 0, which starts rollout."""
        self._commits.publish(weights, self._term, self._new_lineage, Version(0), None)

    def holds(self, weights: Mapping[str, Any] | Published) -> None:
        """Provide the weights of the joined version, which are published again if the parameter server lacks them.

        The server deletes the versions of all checkpoints but the newest, while rollout waits for the joined version.
        """
        self._commits.holds(weights)
        self._commits.republish_damaged(self._term)

    def batches(self, steps: int, *, ahead: bool = False) -> Generator[TrainBatch]:
        """Yield the batch of every step up to ``steps``, prefetching one; each must be committed before the next.

        Ends early after ``interrupt``, and when the run was drained, which sets ``drained``. An uncommitted batch is
        kept and served to the next trainer that joins. After ``begin_commit`` the next batch comes while the version is
        being published, if ``max_staleness`` is at least 1.

        ``ahead``: for data loaders that read ahead. The next batch may be requested before the current one is
        committed, and ``commit`` takes the older of the two. This needs ``max_staleness`` of at least 1, of which it
        uses one, and ``coordination.admission`` "fill"; otherwise the next batch may never come.
        """
        self._uncommitted.clear()  # of an earlier call
        stream, end = self.follow(self._term, self.version, steps)
        started = time.monotonic()
        try:
            while self._next_step < steps:
                try:
                    batch = self._next(stream.get)
                    if not (self._check_current(stream, batch) and self.same(batch)):
                        end()
                        stream, end = self.follow(self._term, self._next_step, steps)
                        continue
                except Stopped:
                    return
                except Drained as drained:
                    self._end_drained(drained)
                    return
                self.waited_s = time.monotonic() - started
                self._uncommitted.append(batch)
                yield batch
                if self._pop_void():
                    end()
                    stream, end = self.follow(self._term, self._next_step, steps)
                self._check_committed(ahead)
                started = time.monotonic()
        finally:
            end()

    def stream(self, steps: int, *, size: int = 1) -> Generator[MicroBatch]:
        """Yield each step's batch in micro-batches of ``size`` whole groups, each as soon as it is available.

        The gradients of a step's micro-batches add up. The one with ``batch`` set completes the step and must be
        committed before the next. One with ``first`` set voids the results of the step's earlier ones. Otherwise as
        ``batches``.
        """
        if self._place[1] > 1 and self.share is _always:
            raise RuntimeError("share is not set; with several ranks, it must announce every micro-batch to the others")
        self._uncommitted.clear()  # of an earlier call
        stream, feeding = self._feeding(self.version, steps, size)
        try:
            while self._next_step < steps:
                started = time.monotonic()
                try:
                    micro_batch = self._next(stream.micro_batch)
                    current = micro_batch.batch is None or self._check_current(stream, micro_batch.batch)
                    if not (current and self.share(micro_batch)):
                        feeding.cancel()
                        stream, feeding = self._feeding(self._next_step, steps, size)
                        continue
                except Stopped:
                    return
                except Drained as drained:
                    self._end_drained(drained)
                    return
                self.waited_s = time.monotonic() - started
                if micro_batch.batch is not None:
                    self._uncommitted.append(micro_batch.batch)
                yield micro_batch
                if self._pop_void():
                    feeding.cancel()
                    stream, feeding = self._feeding(self._next_step, steps, size)
                else:
                    self._check_committed()
        finally:
            feeding.cancel()

    def _end_drained(self, drained: Drained) -> None:
        self.drained = str(drained)
        log.info("run drained after version %d (%s), no further batch follows", self.version, drained)

    def quarantine(self, groups: Sequence[GroupId], why: str) -> None:
        """Give up untrainable groups of the last batch or micro-batch.

        They are dropped permanently, and the batch is sealed again without them: ``batches`` yields it next, ``stream``
        its first micro-batch. The step's results so far are void. ``NoBatch`` if too many groups fail in a row.
        """
        if len(self._uncommitted) > 1:
            raise RuntimeError("a trainer that reads ahead cannot quarantine groups; use batches without ahead")
        self.finish_commit()
        log.error("quarantined: %s", why)
        self._wait(self._stream(self._term).quarantine(groups, why))
        self._uncommitted.clear()
        self._void = True

    @property
    def _next_step(self) -> Version:
        """The first step whose batch the caller does not have."""
        return Version(self.version + (self._commits.publication is not None) + len(self._uncommitted))

    def _pop_void(self) -> bool:
        void, self._void = self._void, False
        return void

    def _feeding(self, version: Version, steps: int, size: int) -> tuple[MicroBatchStream, Cancellable]:
        """Start the micro-batches from the step of that version on; return them and the handle that stops them."""
        stream = self.micro_batches(self._term, size)
        return stream, self._thread.start(stream.feed_micro_batches(Step(version), steps))

    def micro_batches(self, term: TrainerTerm, size: int = 1) -> MicroBatchStream:
        """Return the micro-batches of a joined term: rank 0 requests them, the others their shares of each."""
        rank, world = self._place
        return MicroBatchStream(
            self._scheduler, self._shards, term, size=size, rank=rank, world=world, model=self.model
        )

    def _check_current(self, stream: BatchStream, batch: TrainBatch | Batch) -> bool:
        current = self._wait(stream.is_current(batch))
        if not current:
            log.warning("batch %d of step %d was revoked, fetching its replacement", batch.batch, batch.step)
        return current

    def _next(self, coming: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the next item. Repairs the newest version meanwhile: no item arrives while rollout cannot load it.

        An error of the publication under way is raised as soon as it is known.
        """
        while True:
            publication = self._commits.publication
            if publication is None:
                item = self._wait(within(POLL_INTERVAL_S, coming()))
            else:
                item = self._wait(within(POLL_INTERVAL_S, self._until_published(publication, coming())))
            self._commits.settle()
            if item is not None:
                return item
            if publication is self._commits.publication:  # it waited for the whole interval
                self._commits.republish_damaged(self._term)
                self.on_wait()

    async def _until_published(self, publication: Publication, call: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of ``call``; cancel it and return None once the publication has ended.

        After a moment the scheduler is notified that the trainer waits, which prefetching alone does not show.
        """
        coming, ended = asyncio.ensure_future(call), asyncio.ensure_future(publication.done.wait())
        tasks: list[asyncio.Future[Any]] = [coming, ended]
        try:
            await asyncio.wait(tasks, timeout=MIN_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
            if not (coming.done() or ended.done()):
                tasks.append(asyncio.ensure_future(self._request_waiting(self._next_step)))
                await asyncio.wait((coming, ended), return_when=asyncio.FIRST_COMPLETED)
            return coming.result() if coming.done() else None
        finally:
            for task in tasks:
                task.cancel()

    async def _request_waiting(self, step: int) -> None:
        """Request a batch as the trainer's next work. The prefetch gets it, too; this reply is not used."""
        request = GetBatch(trainer_term=self._term, step=Step(step), rank=self._place[0], waiting=True)
        with suppress(Refused, ProtocolError):
            await self._scheduler.call(request, timeout_s=None)

    def _stream(self, term: TrainerTerm) -> BatchStream:
        rank, world = self._place
        return BatchStream(self._scheduler, self._shards, term, rank=rank, world=world, model=self.model)

    def follow(self, term: TrainerTerm, version: Version, steps: int) -> tuple[BatchStream, Callable[[], object]]:
        """Start the batches of rank 0's term from that version on; return them and a function that stops them."""
        stream = self._stream(term)
        return stream, self._thread.start(stream.feed(Step(version), steps)).cancel

    def wait(self, call: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``call``. ``Stopped`` after ``interrupt``, ``Fenced`` if another trainer has joined."""
        return self._wait(call)

    def _check_committed(self, ahead: bool = False) -> None:
        if len(self._uncommitted) > ahead:
            batch = self._uncommitted[0]
            raise RuntimeError(f"batch {batch.batch} of step {batch.step} was not committed")

    def commit(self, weights: Mapping[str, Any] | Published) -> Version:
        """Publish the weights trained on the current batch, which consumes the batch; return the new version.

        ``weights``: a ``state_dict``, NumPy arrays with bfloat16 as its bits in uint16, or an iterable that gathers
        them. ``BadVersion``: the batch was revoked during the step. These weights are void; the trainer must join again
        from a checkpoint.
        """
        self.finish_commit()
        batch = self._oldest_uncommitted()
        version = Version(batch.step + 1)
        try:
            self._commits.publish(weights, self._term, self._new_lineage, version, batch.batch)
        except Refused as refused:
            raise_refusal(refused, version, batch)
        self._uncommitted.popleft()
        return self.version

    def begin_commit(self, weights: Mapping[str, Any] | Published) -> Version:
        """Start to publish the weights trained on the current batch; return the version that they become.

        As ``commit``, but the next step may be trained meanwhile, if ``max_staleness`` is at least 1. One version is
        published at a time: this call waits for the one before. An error of the publication is raised by one of the
        next calls. The run counts the version once it is stored: a trainer that ends before gets the batch again.

        Arrays and tensors in main memory are read while the caller continues: call ``before_update`` before you change
        them. Tensors of a GPU, and weights that are gathered during the iteration, are copied before this call returns.
        """
        self.finish_commit()
        publication = self._commits.begin(weights, self._term, self._new_lineage, self._oldest_uncommitted())
        self._uncommitted.popleft()
        if publication.gathered:
            self._commits.wait_read(publication)
        return publication.version

    def before_update(self) -> None:
        """Wait until the weights given to ``begin_commit`` may change, and raise its error if it has failed.

        From then on this process cannot publish its newest version again: it has other bytes.
        """
        self._commits.before_update()

    def finish_commit(self) -> Version:
        """Wait until the version of ``begin_commit`` is stored, and return the newest version. Raise as ``commit``.

        No effect without a version under way.
        """
        self._commits.finish()
        return self.version

    def wait_published(self, version: Version) -> None:
        """As ``finish_commit``, if ``version`` is under way."""
        if version > self.version:
            self.finish_commit()

    def cancel_commit(self) -> None:
        """Stop waiting for the version of ``begin_commit``, which may exist or not; ``join`` finds out."""
        self._commits.cancel()

    def commit_result(self) -> Callable[[], None]:
        """Return a function for any thread that waits for the version under way, and raises as ``finish_commit``."""
        return self._commits.result()

    def _oldest_uncommitted(self) -> TrainBatch | Batch:
        if not self._uncommitted:
            raise RuntimeError("there is no batch to commit")
        return self._uncommitted[0]

    def commit_external(self, digest: str) -> Version:
        """Like ``commit``, for weights that reach the engines the user's own way: readers get ``digest`` instead.

        Every reader must be able to fetch the weights before this call. Version 0 may be one:
        ``publish_initial(external(digest))``. Only engines of the user can load such a version.
        """
        return self.commit(external(digest))

    def write_spans(self, to: BeginPublishReply, weights: Spans) -> RankUpload:
        """Upload this rank's part of a version that rank 0 has begun, and return what to report to it. Thread-safe."""
        return self._commits.write_spans(to, weights)

    def checkpointed(self, lineage: Lineage, version: Version, *, keep: int = 1) -> Version | None:
        """Register a checkpoint: the trainer can resume from it, and from the ``keep`` - 1 registered before it.

        Return the oldest version for which the run keeps payload; checkpoints before it may be deleted. Return None if
        the scheduler did not acknowledge; delete nothing then. If the version is being published, wait for that.
        """
        self.wait_published(version)
        request = RegisterCheckpoint(trainer_term=self._term, lineage=lineage, version=version, keep=keep)
        registered = self._send(self._scheduler.ask(request, RegisterCheckpointReply, timeout_s=None))
        return None if registered is None else registered.oldest

    def crowded(self) -> bool:
        """Return whether a trajectory server may soon reject pushes for lack of room; False if one does not reply."""
        return any(status.used_share >= CROWDED_FRACTION for status in self._shard_statuses())

    def full(self) -> bool:
        """Return whether a trajectory server rejects pushes for lack of room; False if one does not reply."""
        return any(status.full for status in self._shard_statuses())

    def _shard_statuses(self) -> list[TrajectoriesStatus]:
        try:
            return self._wait(self._statuses(), grace_s=SEND_TIMEOUT_S)
        except (Stopped, Unavailable):
            return []

    async def _statuses(self) -> list[TrajectoriesStatus]:
        requests = [shard.ask(GetStatus(), TrajectoriesStatus, timeout_s=STATUS_TIMEOUT_S) for shard in self._shards]
        return await asyncio.gather(*requests)

    def metrics(self, step: Step, values: Mapping[str, float]) -> None:
        """Send numbers for the run's metrics file.

        While a version is being published they are sent after it, with the duration of its publication: the scheduler
        adds its own numbers of a step once the step's version is published.
        """
        message = Metrics(worker=self.worker, step=step, values=dict(values))
        if self._commits.publish_s is not None:
            message.values.setdefault(PUBLISH_TOTAL, self._commits.publish_s)
            self._commits.publish_s = None
        if (publication := self._commits.publication) is None:
            self._send(self._scheduler.ask(message, Done, timeout_s=METRICS_TIMEOUT_S))
            return
        self._reported = asyncio.Event()
        self._thread.start(self._metrics_after(publication, message, self._reported))

    async def _metrics_after(self, publication: Publication, message: Metrics, reported: asyncio.Event) -> None:
        try:
            await publication.done.wait()
            if publication.error is None:
                message.values.setdefault(PUBLISH_TOTAL, publication.seconds)
                await self._scheduler.ask(message, Done, timeout_s=METRICS_TIMEOUT_S)
        except (Refused, Unavailable) as error:
            log.warning("metrics of step %d not acknowledged by the scheduler: %r", message.step, error)
        finally:
            reported.set()

    def _flush_metrics(self) -> None:
        """Wait a moment for metrics that follow a version."""
        if (reported := self._reported) is not None:
            self._reported = None
            self._send(_until_set(reported, SEND_TIMEOUT_S))

    def finished(self, error: str = "", term: TrainerTerm | None = None) -> None:
        """Drain the run after the last step, or after ``error``. ``term``: rank 0's, if another rank calls it."""
        self.finish_commit()
        self._flush_metrics()
        message = Finished(trainer_term=self._term if term is None else term, error=error)
        self._send(self._scheduler.ask(message, Done, timeout_s=30))

    def interrupt(self) -> None:
        """End all waits soon; may be called from any thread or signal handler."""
        self._thread.stop_waiting()

    @property
    def closed(self) -> bool:
        """True after ``close``."""
        return self._thread.closed

    def close(self) -> None:
        """Leave the run. A version that is still being published may be lost. Idempotent."""
        if self._thread.closed:
            return
        self.cancel_commit()
        self._flush_metrics()
        if self.run:
            self._send(self._scheduler.ask(Detach(worker=self.worker, why="closed"), Done, timeout_s=SEND_TIMEOUT_S))
        self._thread.close(self._close_sockets)

    @property
    def current_term(self) -> tuple[TrainerTerm, Version]:
        """Return the term, and the version with which it started."""
        return self._term, self.version

    @property
    def _new_lineage(self) -> Lineage:
        if self._join_reply is None:
            raise RuntimeError("join first")
        return self._join_reply.lineage

    @property
    def _term(self) -> TrainerTerm:
        if self._join_reply is None:
            raise RuntimeError("join first")
        return self._join_reply.trainer_term

    def _send(self, call: Coroutine[Any, Any, T]) -> T | None:
        """Send a message whose loss is harmless. Return None if it was not acknowledged."""
        try:
            return self._wait(call, grace_s=SEND_TIMEOUT_S)
        except (Stopped, Unavailable) as error:
            log.warning("message not acknowledged by the scheduler: %r", error)
            return None

    def _wait(
        self, call: Coroutine[Any, Any, T], *, grace_s: float = 0.0, late: Callable[[], Exception] = Stopped
    ) -> T:
        try:
            return self._thread.wait(call, grace_s, late)
        except Refused as refused:
            if refused.code is Code.FENCED:
                raise fenced(refused.detail) from refused
            raise

    def _close_sockets(self) -> None:
        for client in (self._scheduler, *self._shards):
            client.close()
        self._commits.close()


async def _until_set(event: asyncio.Event, timeout_s: float) -> None:
    """Wait for the event, at most ``timeout_s``."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


def _always(_: object) -> bool:
    return True
