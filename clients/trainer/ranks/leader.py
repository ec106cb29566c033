"""Rank 0 leads and the others follow: each call of the loop is sent to every rank before rank 0 executes its own part.

Only rank 0 communicates with the service about versions, checkpoints and metrics. Every rank waits for the sealed batch
itself and fetches its own groups. The ranks then compare batch numbers, and fetch again if a batch was sealed again
between two of them. A rank with a stop request reports it there, and all ranks end at that point. With streaming, only
rank 0 requests micro-batches; it announces the groups of each, and every rank fetches its own share.
"""

import logging
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from staleflow.clients.trainer.backends.base import (
    Array,
    AsyncBackend,
    OutOfMemory,
    OverlapBackend,
    Published,
    StepResult,
    Stopped,
    Stopping,
    StreamingBackend,
    Untrainable,
)
from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.clients.trainer.data.micro_batches import MicroBatch, concatenated
from staleflow.clients.trainer.ranks.uploads import FollowerUploads, LeaderUploads, UploadChannel, WriteSpans
from staleflow.clients.weights.sharded import RankUpload, ShardedWeights, Span, Spans
from staleflow.protocols.consistency.ids import Step, TrainerTerm, Version
from staleflow.protocols.wire.messages import Batch, BeginPublishReply, Manifest

log = logging.getLogger(__name__)

NO_BATCH = -1
"""Sent instead of a batch number by a rank with a stop request."""
MISSING, FETCHED = 0, 1
"""Fetch outcome of this rank's share of a micro-batch."""


class Order(IntEnum):
    """Orders of rank 0, each with its arguments."""

    LOAD = 0
    """term, version; the checkpoint's path, or empty"""
    BATCH = 1
    """step"""
    TRAIN = 2
    """step"""
    GATHER = 3
    SAVE = 4
    """path"""
    EVALUATE = 5
    """version"""
    END = 6
    MICRO_BATCH = 7
    """a header, JSON"""
    ADD = 8
    """whether it is the first of its step, and whether the last"""
    FINISH = 9
    """a header without groups, JSON"""
    BEGIN_SAVE = 10
    """path"""
    UPLOAD = 11
    """whether to copy the weights first"""


class OrderChannel(Protocol):
    """The communication between ranks that this module needs."""

    @property
    def uploads(self) -> UploadChannel: ...

    def broadcast(self, order: list[int], text: str = "") -> None: ...

    def receive(self) -> tuple[list[int], str]: ...

    def gather(self, values: Array) -> Array: ...

    def written(self, ok: bool) -> list[int]: ...

    def barrier(self) -> None: ...

    def close(self) -> None: ...


class RankBackend(StreamingBackend, AsyncBackend, OverlapBackend, Protocol):
    """A backend with an instance on every rank."""

    def gather(self) -> None:
        """Take part in an iteration over rank 0's ``weights``."""
        ...

    def sharded_weights(self) -> ShardedWeights:
        """Return this rank's view of ``weights``, if they need every rank."""
        ...

    @property
    def together(self) -> bool:
        """True if weights and evaluation need every rank."""
        ...


class Leader:
    """Rank 0's backend, which leads the other ranks. ``current_term`` returns the trainer term and the version."""

    def __init__(
        self, backend: RankBackend, ranks: OrderChannel, current_term: Callable[[], tuple[TrainerTerm, Version]]
    ) -> None:
        self._backend = backend
        self._ranks = ranks
        self._current_term = current_term
        self._first = True
        """The next part starts a step."""
        self._idle = True
        """False during an operation, in which the other ranks cannot receive an order."""
        self.uploads = LeaderUploads(ranks.uploads)

    def check(self, directory: Path) -> None:
        """Check on behalf of all ranks, as a complete checkpoint has the files of every rank."""
        self._backend.check(directory)

    def load(self, directory: Path | None) -> None:
        text = "" if directory is None else str(directory.absolute())
        with self._operation(Order.LOAD, *self._current_term(), text=text):
            self._backend.load(directory)

    def same(self, batch: TrainBatch) -> bool:
        """Return whether every rank has this batch. ``Stopped`` if any has a stop request."""
        with self._operation(Order.BATCH, batch.step):
            numbers = self._ranks.gather(np.array([batch.batch], np.int64))
        if NO_BATCH in numbers:
            raise Stopped
        return bool((numbers == batch.batch).all())

    def train(self, batch: TrainBatch, step: Step, stopping: Stopping) -> StepResult:
        with self._operation(Order.TRAIN, step):
            return self._backend.train(batch, step, stopping)

    def share(self, micro_batch: MicroBatch) -> bool:
        """Return whether every rank has its share of this micro-batch. ``Stopped`` if any has a stop request."""
        with self._operation(Order.MICRO_BATCH, text=_encode(micro_batch.header)):
            flags = self._ranks.gather(np.array([FETCHED], np.int64))
        if NO_BATCH in flags:
            raise Stopped
        return bool((flags == FETCHED).all())

    def begin(self) -> None:
        self._first = True

    def add(self, part: TrainBatch, stopping: Stopping, *, last: bool) -> None:
        """Add rank 0's share of the last announced micro-batch."""
        with self._operation(Order.ADD, int(self._first), int(last)):
            if self._first:
                self._backend.begin()
            self._first = False
            self._backend.add(part, stopping, last=last)

    def finish(self, batch: TrainBatch, step: Step) -> StepResult:
        header = Batch(
            batch=batch.batch,
            lineage=batch.lineage,
            step=batch.step,
            attempt=batch.attempt,
            members=[],
            digest=batch.digest,
            mask_below=Version(-1),
        )
        with self._operation(Order.FINISH, text=_encode(header)):
            return self._backend.finish(batch, step)

    def set_before_update(self, wait: Callable[[], None]) -> None:
        """Only rank 0 waits: the others publish copies of their parts, or publish before they follow the next order."""
        self._backend.set_before_update(wait)

    def weights(self) -> Published:
        return _LedWeights(self, self._backend.sharded_weights()) if self._backend.together else self._backend.weights()

    def each(self, published: Published) -> Iterator[tuple[str, Array]]:
        """Iterate over weights of which every rank has a part."""
        with self._operation(Order.GATHER):
            yield from published.items()

    def start_uploads(self, own: ShardedWeights, *, copy: bool) -> Spans | None:
        """Have every rank take part in the uploads of a version; ``uploads.end`` releases them."""
        with self._operation(Order.UPLOAD, int(copy)):
            return self.uploads.start(own, copy=copy)

    def save(self, directory: Path) -> None:
        with self._operation(Order.SAVE, text=str(directory.absolute())):
            self._backend.save(directory)
            self._ranks.barrier()

    def begin_save(self, directory: Path) -> Callable[[], None]:
        """Copy the state on every rank. The returned function also waits for the other ranks, which write meanwhile."""
        with self._operation(Order.BEGIN_SAVE, text=str(directory.absolute())):
            write = self._backend.begin_save(directory)

        def written() -> None:
            try:
                write()
            except BaseException:
                self._ranks.written(False)
                raise
            if failed := self._ranks.written(True):
                raise RuntimeError(f"ranks {failed} failed to write their part of {directory}; see their logs")

        return written

    def evaluate(self, version: Version, stopping: Stopping) -> dict[str, float]:
        if not self._backend.together:
            return self._backend.evaluate(version, stopping)
        with self._operation(Order.EVALUATE, version):
            return self._backend.evaluate(version, stopping)

    def close(self) -> None:
        """Release the others. During an operation they detect the end of this process by themselves."""
        if self._idle and not self.uploads.active:
            self._announce(Order.END)
            self._backend.close()
            self._ranks.close()

    def _announce(self, order: Order, *arguments: int, text: str = "") -> None:
        self._idle = False
        self._ranks.broadcast([order, *arguments], text)

    @contextmanager
    def _operation(self, order: Order, *arguments: int, text: str = "") -> Generator[None]:
        """Announce an order and lead its operation. After any other error, the ranks may be at different places."""
        self._announce(order, *arguments, text=text)
        try:
            yield
        except (Stopped, Untrainable):
            self._idle = True  # every rank raised it
            raise
        self._idle = True


class _LedWeights:
    """Weights of all ranks (``LedWeights``); each iteration and each upload is announced to them."""

    def __init__(self, leader: Leader, own: ShardedWeights) -> None:
        self._leader = leader
        self._own = own

    def items(self) -> Iterable[tuple[str, Array]]:
        return self._leader.each(self._own)

    def layout(self) -> Manifest:
        return self._own.layout()

    def spans(self) -> Iterator[Span]:
        return self._own.spans()

    def start_uploads(self, *, copy: bool) -> Spans | None:
        return self._leader.start_uploads(self._own, copy=copy)

    def send_destination(self, to: BeginPublishReply) -> None:
        self._leader.uploads.send(to)

    def collect(self, own: RankUpload) -> list[RankUpload]:
        return self._leader.uploads.collect(own)

    def end_uploads(self) -> None:
        self._leader.uploads.end()


class Batches(Protocol):
    """The follower's source of batches."""

    def follow(self, term: TrainerTerm, version: Version) -> None:
        """Start fetching batches from this version on, for this term."""
        ...

    def batch(self, step: Step) -> TrainBatch | None:
        """Return the newest batch of that step; None after a stop request."""
        ...

    def micro_batch(self, header: Batch) -> TrainBatch | None:
        """Return this rank's share of these groups; None if it cannot be fetched. ``Stopped`` after a stop request."""
        ...

    def give_up(self, why: str) -> None:
        """Report to the run that this rank cannot continue."""
        ...


def _encode(header: Batch) -> str:
    return msgspec.json.encode(header).decode()


def _decode(text: str) -> Batch:
    return msgspec.json.decode(text, type=Batch)


class _FollowerStep:
    """A follower's shares of the current step."""

    def __init__(self, backend: RankBackend, ranks: OrderChannel, batches: Batches) -> None:
        self._backend = backend
        self._ranks = ranks
        self._batches = batches
        self._fetched: TrainBatch | None = None
        self._parts: list[TrainBatch] = []

    def fetch(self, header: Batch) -> None:
        """Fetch the share of a micro-batch and report the outcome."""
        try:
            self._fetched = self._batches.micro_batch(header)
            flag = MISSING if self._fetched is None else FETCHED
        except Stopped:
            flag = NO_BATCH
        self._ranks.gather(np.array([flag], np.int64))

    def add(self, stopping: Stopping, *, first: bool, last: bool) -> None:
        """Add the fetched share to the step."""
        assert self._fetched is not None
        if first:
            self._backend.begin()
            self._parts.clear()
        self._parts.append(self._fetched)
        self._backend.add(self._fetched, stopping, last=last)

    def finish(self, header: Batch) -> None:
        """Take the step with all shares."""
        self._backend.finish(concatenated(self._parts, header), header.step)


class _FollowerWriter:
    """A follower's thread that writes its part of a checkpoint, one at a time."""

    def __init__(self, ranks: OrderChannel) -> None:
        self._ranks = ranks
        self._thread: threading.Thread | None = None

    def start(self, write: Callable[[], None]) -> None:
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception:  # rank 0 ends the run, unless a later trainer has removed the checkpoint
            log.exception("part of a checkpoint not written")
            self._ranks.written(False)
        else:
            self._ranks.written(True)


def follow(
    backend: RankBackend,
    ranks: OrderChannel,
    batches: Batches,
    stopping: Stopping,
    write_spans: WriteSpans,
) -> None:
    """Execute the orders of rank 0 until it releases this rank. ``write_spans`` uploads this rank's weights.

    Raise ``OutOfMemory`` after reporting it to the run: rank 0 cannot, as it may wait for this rank within a pass.
    """
    batch: TrainBatch | None = None
    parts, writer = _FollowerStep(backend, ranks, batches), _FollowerWriter(ranks)
    uploads = FollowerUploads(ranks.uploads, write_spans)
    while True:
        (kind, first, second, *_), text = ranks.receive()
        try:
            match Order(kind):
                case Order.LOAD:
                    backend.load(Path(text) if text else None)
                    batches.follow(TrainerTerm(first), Version(second))
                case Order.BATCH:
                    batch = batches.batch(Step(first))
                    number = NO_BATCH if batch is None else int(batch.batch)
                    ranks.gather(np.array([number], np.int64))
                case Order.TRAIN:
                    assert batch is not None
                    backend.train(batch, Step(first), stopping)
                case Order.MICRO_BATCH:
                    parts.fetch(_decode(text))
                case Order.ADD:
                    parts.add(stopping, first=bool(first), last=bool(second))
                case Order.FINISH:
                    parts.finish(_decode(text))
                case Order.GATHER:
                    backend.gather()
                case Order.UPLOAD:
                    uploads.take_part(backend.sharded_weights(), copy=bool(first))
                case Order.SAVE:
                    backend.save(Path(text))
                    ranks.barrier()
                case Order.BEGIN_SAVE:
                    writer.start(backend.begin_save(Path(text)))
                case Order.EVALUATE:
                    backend.evaluate(Version(first), stopping)
                case Order.END:
                    writer.wait()
                    uploads.wait()
                    backend.close()
                    ranks.close()
                    return
        except Stopped:
            log.info("stop requested, waiting for rank 0 to end")
        except Untrainable as error:
            log.info("step restarts, rank 0 reports the reason: %s", error)
        except OutOfMemory as error:
            batches.give_up(str(error))
            raise
