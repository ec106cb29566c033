"""The trainer's side of the service, for a plain training loop::

    with TrainerClient("ipc:///path/to/run/sock/scheduler") as trainer:
        if trainer.join(lineage, version).version < 0:
            trainer.publish_initial(model.state_dict())
        for batch in trainer.batches(steps):
            ...                                  # batch.input_ids, batch.loss_mask, batch.rewards, ...
            trainer.commit(model.state_dict())   # returns when version step + 1 exists
        trainer.finished()

Blocking; the sockets live on a loop in a thread of their own, so heartbeats and the next batch go on while a step
computes. Every call may raise ``Fenced``: another trainer has joined, and nothing that this one does counts any more.
``join`` and ``commit`` may raise ``BadVersion``, ``batches`` and ``stream`` ``NoBatch``.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, Self, TypeVar, cast

import uvloop

from staleflow.clients.attachment import attach
from staleflow.clients.trainer.backends.base import Drained, Published, Stopped
from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.clients.trainer.data.micro_batches import Piece, PieceStream
from staleflow.clients.trainer.prefetch import BatchStream
from staleflow.clients.weights import Publisher
from staleflow.net.client import Client, worker_id
from staleflow.net.errors import Refused, Unavailable
from staleflow.net.permissions import Role
from staleflow.net.security import client_sockets
from staleflow.net.transport import Transport
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import BatchId, GroupId, Lineage, Step, TrainerTerm, Version
from staleflow.protocols.wire.messages import (
    Attach,
    AttachReply,
    Batch,
    Detach,
    Done,
    Finished,
    GetStatus,
    Join,
    JoinReply,
    Metrics,
    ModelLimits,
    RegisterCheckpoint,
    RegisterCheckpointReply,
    Status,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

COMMIT_GRACE_S = 5.0
"""Once asked to end, a commit under way may take this long."""
CROWDED_SHARE = 0.5
"""Of a trajectory server's map. Beyond it consumed payload should go, which only a checkpoint lets happen."""
STATUS_TIMEOUT_S = 1.0
POLL_INTERVAL_S = 5.0
"""After waiting so long for a batch: is the newest version still whole?"""
FAREWELL_GRACE_S = 1.0
"""Once asked to end, nothing else that is said waits longer than this."""


class Fenced(Exception):
    """Another trainer has joined the run; this one must stop."""


class BadVersion(Exception):
    """The run does not take these weights, nor what would come of them; the text says why."""


class Cancellable(Protocol):
    """Work in the background."""

    def cancel(self) -> object: ...


class Background(Protocol):
    """The loop behind a caller that blocks. ``LoopThread``, or virtual time in ``staleflow.sim.faults``."""

    closed: bool

    def start(self, work: Coroutine[Any, Any, Any]) -> Cancellable:
        """Run in the background."""
        ...

    def wait(self, work: Coroutine[Any, Any, T], grace_s: float, late: Callable[[], Exception]) -> T:
        """Return the result; once asked to stop, ``late()`` is raised ``grace_s`` seconds after."""
        ...

    def stop_waiting(self) -> None:
        """End what waits, soon; from any thread."""
        ...

    def close(self, last: Callable[[], None]) -> None:
        """Run ``last`` on the loop and end what is left."""
        ...


class TrainerClient:
    """One trainer of one run. Not safe for threads, but for ``interrupt``."""

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
        """``transport``: with the trainer's key. Without one, the environment's STALEFLOW_KEY names it, if any.
        ``direct``: ``tcp://host:port`` (0: any) where engines get the newest version from this process itself."""
        self.worker = worker_id(name)
        self._place = (rank, world)
        self.same: Callable[[TrainBatch], bool] = _always
        """Whether the other ranks have the same batch; if not, it is fetched again."""
        self.share: Callable[[Piece], bool] = _always
        """Whether the other ranks have their shares of the piece; if not, its step begins again."""
        self.model = ModelLimits()
        """What the model can read, for a trainer that knows: set before ``join``. Trajectory servers refuse groups that
        exceed it, and one that is fetched all the same is quarantined."""
        self.on_wait: Callable[[], None] = lambda: None
        """Called each time a batch, or the next of its groups, has been waited for so long that it is worth a look."""
        self._name = name
        self._config_sha = config_sha
        self._thread: Background = background or LoopThread()
        self._transport = transport or client_sockets(None, Role.TRAINER)
        self._scheduler = Client(scheduler, worker=self.worker, transport=self._transport)
        self._shards: list[Client] = []
        self._publisher: Publisher | None = None
        self._direct = direct
        self._joined: JoinReply | None = None
        self.version = Version(0)
        """Of the weights that the trainer holds, as far as the run knows."""
        self._lineage = Lineage(0)
        """Of that version: the run's own has moved on after a rollback."""
        self._held: tuple[Mapping[str, Any] | Published, BatchId | None] | None = None
        """Its weights as they were published, and the batch that made them."""
        self._current: TrainBatch | Batch | None = None
        self._void = False
        """The batch or piece that was given out last holds groups that are quarantined."""
        self.waited_s = 0.0
        """Seconds for which the last batch let the trainer wait."""
        self.run = ""
        """The run's identity, once attached."""
        self.drained = ""
        """Why ``batches`` or ``stream`` ended early, when the run was drained; ``finished`` comes next."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def attach(self) -> AttachReply:
        """Become known to the run; waits for its servers. ``join`` does it when it was not done before."""
        request = Attach(
            worker=self.worker, name=self._name, role="trainer", config_sha=self._config_sha, pid=os.getpid()
        )
        attached = self._wait(attach(self._scheduler, request, parameters=True))
        self.run = attached.run
        self._shards = [Client(endpoint, worker=self.worker, transport=self._transport) for endpoint in attached.shards]
        self._publisher = Publisher(
            attached.parameters, worker=self.worker, transport=self._transport, direct=self._direct
        )
        return attached

    def join(self, lineage: Lineage, version: Version) -> JoinReply:
        """Take over with the weights of (lineage, version), (0, 0) being the initial model. Older trainers are fenced.

        From an older version the run rolls back to it. The answer's version is -1 while nothing is published: then
        ``publish_initial`` comes next. ``BadVersion`` when the run cannot go on from there.
        """
        if self._publisher is None:
            self.attach()
        request = Join(trainer=self.worker, lineage=lineage, version=version, model=self.model)
        try:
            self._joined = self._wait(self._scheduler.ask(request, JoinReply, timeout_s=None))
        except Refused as refused:
            if refused.code is Code.BAD_VERSION:
                raise BadVersion(f"version {version} of lineage {lineage}: {refused.detail}") from refused
            raise
        self.version, self._lineage = version, lineage
        return self._joined

    def publish_initial(self, weights: Mapping[str, Any] | Published) -> None:
        """Publish version 0; rollout begins."""
        self._publish(weights, self._new_lineage, Version(0), None)

    def holds(self, weights: Mapping[str, Any] | Published) -> None:
        """These are the weights of the version joined with: published again if the parameter server lacks them.

        It deletes the versions of all checkpoints but the newest; rollout waits for the one of an older checkpoint.
        """
        self._held = weights, None
        self._mend()

    def batches(self, steps: int) -> Generator[TrainBatch]:
        """The batch of every step up to ``steps``, one fetched ahead; each must be committed before the next.

        Ends early after ``interrupt``, and when the run was drained, which sets ``drained``. Leaving a batch
        uncommitted keeps it: the next trainer that joins is served it again.
        """
        stream, end = self.follow(self._term, self.version, steps)
        started = time.monotonic()
        try:
            while self.version < steps:
                try:
                    batch = self._next(stream.get)
                    if not (self._stands(stream, batch) and self.same(batch)):
                        end()
                        stream, end = self.follow(self._term, self.version, steps)
                        continue
                except Stopped:
                    return
                except Drained as drained:
                    self._end_drained(drained)
                    return
                self.waited_s = time.monotonic() - started
                self._current = batch
                yield batch
                if self._taken_back():
                    end()
                    stream, end = self.follow(self._term, self.version, steps)
                self._check_committed(batch)
                started = time.monotonic()
        finally:
            end()

    def stream(self, steps: int, *, size: int = 1) -> Generator[Piece]:
        """The batch of every step up to ``steps``, in pieces of ``size`` whole groups, each as soon as it may be used.

        Gradients of a step's pieces add up; the piece that has ``batch`` completes it, and must be committed before the
        next. A piece that is ``first`` voids what was made of earlier ones of its step. Otherwise as ``batches``.
        """
        if self._place[1] > 1 and self.share is _always:
            raise RuntimeError("the other ranks must be told of every piece: set share")
        stream, feeding = self._feeding(self.version, steps, size)
        try:
            while self.version < steps:
                started = time.monotonic()
                try:
                    piece = self._next(stream.piece)
                    stands = piece.batch is None or self._stands(stream, piece.batch)
                    if not (stands and self.share(piece)):
                        feeding.cancel()
                        stream, feeding = self._feeding(self.version, steps, size)
                        continue
                except Stopped:
                    return
                except Drained as drained:
                    self._end_drained(drained)
                    return
                self.waited_s = time.monotonic() - started
                self._current = piece.batch
                yield piece
                if self._taken_back():
                    feeding.cancel()
                    stream, feeding = self._feeding(self.version, steps, size)
                elif piece.batch is not None:
                    self._check_committed(piece.batch)
        finally:
            feeding.cancel()

    def _end_drained(self, drained: Drained) -> None:
        self.drained = str(drained)
        log.info("no further batch comes after version %d: the run was drained (%s)", self.version, drained)

    def quarantine(self, groups: Sequence[GroupId], why: str) -> None:
        """Give up groups of the batch or piece that was given out last: they cannot be trained.

        They are dropped for good, and the batch is sealed again without them: ``batches`` gives it out next, ``stream``
        its first piece. What was made of the step so far is void. ``NoBatch`` if too many fail one after another.
        """
        log.error("quarantined: %s", why)
        self._wait(self._stream(self._term).quarantine(groups, why))
        self._current, self._void = None, True

    def _taken_back(self) -> bool:
        void, self._void = self._void, False
        return void

    def _feeding(self, version: Version, steps: int, size: int) -> tuple[PieceStream, Cancellable]:
        """Pieces from the step of that version on, and what ends their coming."""
        stream = self.pieces(self._term, size)
        return stream, self._thread.start(stream.feed_pieces(Step(version), steps))

    def pieces(self, term: TrainerTerm, size: int = 1) -> PieceStream:
        """Pieces of a term that has joined: rank 0 asks for them, the others for their shares of each."""
        rank, world = self._place
        return PieceStream(self._scheduler, self._shards, term, size=size, rank=rank, world=world, model=self.model)

    def _stands(self, stream: BatchStream, batch: TrainBatch | Batch) -> bool:
        stands = self._wait(stream.stands(batch))
        if not stands:
            log.warning("batch %d of step %d was taken back, another is fetched", batch.batch, batch.step)
        return stands

    def _next(self, coming: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What comes next. Nothing may, while the newest version is damaged at the server and loaded by nobody."""
        while (found := self._wait(within(POLL_INTERVAL_S, coming()))) is None:
            self._mend()
            self.on_wait()
        return found

    def _mend(self) -> None:
        """Publish the newest version once more if its bytes were lost or damaged."""
        assert self._publisher is not None
        lineage, version = self._lineage, self.version
        looked = within(STATUS_TIMEOUT_S, self._publisher.damaged(lineage, version))
        if not self._wait(looked) or self._held is None:
            return
        weights, batch = self._held
        log.warning(
            "version %d of lineage %d is lost or damaged at the parameter server: published again", version, lineage
        )
        try:
            self._publish(weights, lineage, version, batch)
        except Refused as refused:
            if refused.code is not Code.CONFLICT:
                raise
            log.error("version %d cannot be published again: %s", version, refused.detail)

    def _stream(self, term: TrainerTerm) -> BatchStream:
        rank, world = self._place
        return BatchStream(self._scheduler, self._shards, term, rank=rank, world=world, model=self.model)

    def follow(self, term: TrainerTerm, version: Version, steps: int) -> tuple[BatchStream, Callable[[], object]]:
        """Batches of a term that rank 0 has joined, from the step of that version on, and what ends their coming."""
        stream = self._stream(term)
        return stream, self._thread.start(stream.feed(Step(version), steps)).cancel

    def wait(self, call: Coroutine[Any, Any, T]) -> T:
        """Its result. ``Stopped`` after ``interrupt``, ``Fenced`` when another trainer has joined."""
        return self._wait(call)

    def _check_committed(self, batch: TrainBatch | Batch) -> None:
        if self._current is batch:
            raise RuntimeError(f"batch {batch.batch} of step {batch.step} was not committed")

    def commit(self, weights: Mapping[str, Any] | Published) -> Version:
        """Publish what the current batch made of the weights; its data is spent and the new version is returned.

        ``weights``: a ``state_dict``, or NumPy arrays with bfloat16 as its bits in uint16; also one that gathers them
        while it is gone through. ``BadVersion``: the batch was taken back while it was trained. What it made of the
        weights is void; a trainer must join again from a checkpoint.
        """
        batch = self._current
        if batch is None:
            raise RuntimeError("there is no batch to commit")
        try:
            self._publish(weights, self._new_lineage, Version(batch.step + 1), batch.batch)
        except Refused as refused:
            if refused.code is not Code.BAD_VERSION:
                raise
            lost = f"step {batch.step}: batch {batch.batch} was taken back while it was trained, the step is void"
            raise BadVersion(f"{lost}; go on from the newest checkpoint ({refused.detail})") from refused
        self._current = None
        return self.version

    def checkpointed(self, lineage: Lineage, version: Version, *, keep: int = 1) -> Version | None:
        """Register a checkpoint: this trainer can come back at it, and at the ``keep`` - 1 registered before it.

        Returns the oldest version that the run keeps payload for; checkpoints before it may be deleted. None when the
        scheduler did not acknowledge: then delete nothing.
        """
        request = RegisterCheckpoint(trainer_term=self._term, lineage=lineage, version=version, keep=keep)
        registered = self._say(self._scheduler.ask(request, RegisterCheckpointReply, timeout_s=None))
        return None if registered is None else registered.oldest

    def crowded(self) -> bool:
        """Whether a trajectory server is so full that pushes may soon be refused; False if one does not say."""
        return any(float(values["used_share"]) >= CROWDED_SHARE for values in self._shard_values())

    def full(self) -> bool:
        """Whether a trajectory server refuses pushes for want of room; False if one does not say."""
        return any(values["full"] for values in self._shard_values())

    def _shard_values(self) -> list[dict[str, Any]]:
        try:
            return self._wait(self._statuses(), grace_s=FAREWELL_GRACE_S)
        except (Stopped, Unavailable):
            return []

    async def _statuses(self) -> list[dict[str, Any]]:
        asked = [shard.ask(GetStatus(), Status, timeout_s=STATUS_TIMEOUT_S) for shard in self._shards]
        return [status.values for status in await asyncio.gather(*asked)]

    def metrics(self, step: Step, values: Mapping[str, float]) -> None:
        """Numbers for the run's metrics file."""
        self._say(self._scheduler.ask(Metrics(worker=self.worker, step=step, values=dict(values)), Done, timeout_s=30))

    def finished(self, error: str = "", term: TrainerTerm | None = None) -> None:
        """The last step is done, or the run cannot go on: it drains. ``term``: that of rank 0, for another rank."""
        told = Finished(trainer_term=self._term if term is None else term, error=error)
        self._say(self._scheduler.ask(told, Done, timeout_s=30))

    def interrupt(self) -> None:
        """End what waits, soon; from any thread or signal handler."""
        self._thread.stop_waiting()

    def close(self) -> None:
        """Leave the run. May be called again."""
        if self._thread.closed:
            return
        if self.run:
            self._say(self._scheduler.ask(Detach(worker=self.worker, why="closed"), Done, timeout_s=FAREWELL_GRACE_S))
        self._thread.close(self._close_sockets)

    @property
    def joined(self) -> tuple[TrainerTerm, Version]:
        """The term, and the version that it began with."""
        return self._term, self.version

    @property
    def _new_lineage(self) -> Lineage:
        if self._joined is None:
            raise RuntimeError("join first")
        return self._joined.lineage

    @property
    def _term(self) -> TrainerTerm:
        if self._joined is None:
            raise RuntimeError("join first")
        return self._joined.trainer_term

    def _publish(
        self, weights: Mapping[str, Any] | Published, lineage: Lineage, version: Version, batch: BatchId | None
    ) -> None:
        assert self._publisher is not None
        publish = self._publisher.publish(
            as_weights(weights),
            trainer_term=self._term,
            lineage=lineage,
            version=version,
            batch=batch,
        )
        self._wait(publish, grace_s=COMMIT_GRACE_S, late=self._not_in_time)
        self.version, self._lineage = version, lineage
        self._held = weights, batch

    def _not_in_time(self) -> Exception:
        return Unavailable("the parameter server", COMMIT_GRACE_S, "asked to end while a version was being published")

    def _say(self, call: Coroutine[Any, Any, T]) -> T | None:
        """Send something whose loss costs only the reader of a log. None when it was not acknowledged."""
        try:
            return self._wait(call, grace_s=FAREWELL_GRACE_S)
        except (Stopped, Unavailable) as error:
            log.warning("the scheduler did not hear it: %r", error)
            return None

    def _wait(
        self, call: Coroutine[Any, Any, T], *, grace_s: float = 0.0, late: Callable[[], Exception] = Stopped
    ) -> T:
        try:
            return self._thread.wait(call, grace_s, late)
        except Refused as refused:
            if refused.code is Code.FENCED:
                raise Fenced(f"another trainer has joined the run, this one stops ({refused.detail})") from refused
            raise

    def _close_sockets(self) -> None:
        for client in (self._scheduler, *self._shards):
            client.close()
        if self._publisher is not None:
            self._publisher.close()


async def within(seconds: float, call: Coroutine[Any, Any, T]) -> T | None:
    """Its result, or None when that takes longer; then it is cancelled."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await call
    except TimeoutError:
        if not limit.expired():
            raise
        return None


def _always(_: object) -> bool:
    return True


def as_weights(weights: Mapping[str, Any] | Published) -> Published:
    """Arrays as they are; torch tensors as arrays."""
    if not isinstance(weights, Mapping):
        return weights
    given = cast(Mapping[str, Any], weights)
    if any(hasattr(value, "detach") for value in given.values()):
        from staleflow.clients.trainer.backends.tensors import to_arrays

        return to_arrays(given)
    return given


async def until_stop(
    work: Coroutine[Any, Any, T], stopping: asyncio.Event, grace_s: float, late: Callable[[], Exception]
) -> T:
    """Return the result of ``work``; ``late()`` is raised ``grace_s`` seconds after ``stopping``."""
    task, stop = asyncio.ensure_future(work), asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and grace_s:
            await asyncio.wait((task,), timeout=grace_s)
        if not task.done():
            raise late()
        return task.result()
    finally:
        stop.cancel()
        task.cancel()


class LoopThread:
    """A loop in a thread of its own, for a caller that blocks."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name="trainer client", daemon=True)
        self._thread.start()
        self.closed = False

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run in the background; the answer can be cancelled."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, T], grace_s: float, late: Callable[[], Exception]) -> T:
        """The result; once asked to stop, ``late()`` is raised ``grace_s`` seconds after."""
        waiting = until_stop(work, self._stopping, grace_s, late)
        return asyncio.run_coroutine_threadsafe(waiting, self._loop).result()

    def stop_waiting(self) -> None:
        if not self.closed:
            self._loop.call_soon_threadsafe(self._stopping.set)

    def close(self, last: Callable[[], None]) -> None:
        """Run ``last`` on the loop, end what is left, and end the thread."""
        self.closed = True
        asyncio.run_coroutine_threadsafe(self._end(last), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self, last: Callable[[], None]) -> None:
        last()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._loop.shutdown_default_executor()
