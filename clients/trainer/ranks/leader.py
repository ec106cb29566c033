"""Rank 0 leads, the others follow: each call of the loop is told to every rank before rank 0 does its own part.

Rank 0 alone talks to the service about versions, checkpoints and metrics. Every rank waits for the sealed batch itself
and fetches its own groups; the ranks then compare batch numbers, and fetch again when a batch was sealed anew between
two of them. A rank that was asked to end says so there, and all end at that point. When batches come in pieces, rank 0
alone asks for them; it tells the others which groups a piece has, and each fetches its own of these.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from staleflow.clients.trainer.backends.base import (
    Array,
    OutOfMemory,
    Published,
    StepResult,
    Stopped,
    Stopping,
    StreamingBackend,
    Untrainable,
)
from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.clients.trainer.data.micro_batches import Piece, joined
from staleflow.protocols.consistency.ids import Step, TrainerTerm, Version
from staleflow.protocols.wire.messages import Batch

log = logging.getLogger(__name__)

NO_BATCH = -1
"""In place of a batch number: this rank was asked to end."""
LACKS, HAS = 0, 1
"""Of a piece: whether this rank could fetch its share."""


class Order(IntEnum):
    """What rank 0 tells, each with its arguments."""

    LOAD = 0
    """term, version; the checkpoint's path, or nothing"""
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
    PIECE = 7
    """a header, JSON"""
    ADD = 8
    """whether it is the first of its step, and the last"""
    FINISH = 9
    """a header without groups, JSON"""


class Told(Protocol):
    """The ranks, as this file needs them."""

    def tell(self, order: list[int], text: str = "") -> None: ...

    def hear(self) -> tuple[list[int], str]: ...

    def gather(self, values: Array) -> Array: ...

    def barrier(self) -> None: ...

    def close(self) -> None: ...


class Sharded(StreamingBackend, Protocol):
    """A backend of which every rank has one."""

    def gather(self) -> None:
        """This rank's part in a pass over rank 0's ``weights``."""
        ...

    @property
    def together(self) -> bool:
        """True when weights and evaluation need every rank."""
        ...


class Leader:
    """Rank 0's backend: does what it is asked, with the others. ``joined`` gives the trainer term and the version."""

    def __init__(self, backend: Sharded, ranks: Told, joined: Callable[[], tuple[TrainerTerm, Version]]) -> None:
        self._backend = backend
        self._ranks = ranks
        self._joined = joined
        self._first = True
        """The next part begins a step."""
        self._settled = True
        """False while ranks are in the middle of something: then nobody is there to hear an order."""

    def check(self, directory: Path) -> None:
        """For all: who wrote a complete checkpoint for rank 0 wrote it for the others too."""
        self._backend.check(directory)

    def load(self, directory: Path | None) -> None:
        self._tell(Order.LOAD, *self._joined(), text="" if directory is None else str(directory.absolute()))
        self._backend.load(directory)
        self._settled = True

    def same(self, batch: TrainBatch) -> bool:
        """Whether every rank has this batch. ``Stopped`` when one was asked to end."""
        self._tell(Order.BATCH, batch.step)
        numbers = self._ranks.gather(np.array([batch.batch], np.int64))
        self._settled = True
        if NO_BATCH in numbers:
            raise Stopped
        return bool((numbers == batch.batch).all())

    def train(self, batch: TrainBatch, step: Step, stopping: Stopping) -> StepResult:
        self._tell(Order.TRAIN, step)
        try:
            result = self._backend.train(batch, step, stopping)
        except (Stopped, Untrainable):
            self._settled = True  # all of them raised it
            raise
        self._settled = True
        return result

    def share(self, piece: Piece) -> bool:
        """Whether every rank has its share of this piece. ``Stopped`` when one was asked to end."""
        self._tell(Order.PIECE, text=_written(piece.header))
        flags = self._ranks.gather(np.array([HAS], np.int64))
        self._settled = True
        if NO_BATCH in flags:
            raise Stopped
        return bool((flags == HAS).all())

    def begin(self) -> None:
        self._first = True

    def add(self, part: TrainBatch, stopping: Stopping, *, last: bool) -> None:
        """Rank 0's share of the piece that was shared last."""
        self._tell(Order.ADD, int(self._first), int(last))
        if self._first:
            self._backend.begin()
        self._first = False
        try:
            self._backend.add(part, stopping, last=last)
        except (Stopped, Untrainable):
            self._settled = True  # all of them raised it
            raise
        self._settled = True

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
        self._tell(Order.FINISH, text=_written(header))
        result = self._backend.finish(batch, step)
        self._settled = True
        return result

    def weights(self) -> Published:
        published = self._backend.weights()
        return _Gathered(self, published) if self._backend.together else published

    def each(self, published: Published) -> Iterator[tuple[str, Array]]:
        """Go through weights that every rank has a part of."""
        self._tell(Order.GATHER)
        yield from published.items()
        self._settled = True

    def save(self, directory: Path) -> None:
        self._tell(Order.SAVE, text=str(directory.absolute()))
        self._backend.save(directory)
        self._ranks.barrier()
        self._settled = True

    def evaluate(self, version: Version, stopping: Stopping) -> dict[str, float]:
        if not self._backend.together:
            return self._backend.evaluate(version, stopping)
        self._tell(Order.EVALUATE, version)
        try:
            values = self._backend.evaluate(version, stopping)
        except Stopped:
            self._settled = True
            raise
        self._settled = True
        return values

    def close(self) -> None:
        """Let the others go. In the middle of something they notice by themselves, when this process ends."""
        if self._settled:
            self._tell(Order.END)
            self._backend.close()
            self._ranks.close()

    def _tell(self, order: Order, *arguments: int, text: str = "") -> None:
        self._settled = False
        self._ranks.tell([order, *arguments], text)


class _Gathered:
    """Weights of all ranks, told to them each time."""

    def __init__(self, leader: Leader, published: Published) -> None:
        self._leader = leader
        self._published = published

    def items(self) -> Iterable[tuple[str, Array]]:
        return self._leader.each(self._published)


class Batches(Protocol):
    """The follower's own way to the batches."""

    def follow(self, term: TrainerTerm, version: Version) -> None:
        """Batches from this version on, for this term."""
        ...

    def batch(self, step: Step) -> TrainBatch | None:
        """The newest batch of that step; None once this process was asked to end."""
        ...

    def piece(self, header: Batch) -> TrainBatch | None:
        """This rank's share of these groups; None when it cannot be fetched. ``Stopped`` once asked to end."""
        ...

    def give_up(self, why: str) -> None:
        """Tell the run that it cannot go on."""
        ...


def _written(header: Batch) -> str:
    return msgspec.json.encode(header).decode()


def _read(text: str) -> Batch:
    return msgspec.json.decode(text, type=Batch)


class _Parts:
    """A follower's shares of the step under way."""

    def __init__(self, backend: Sharded, ranks: Told, batches: Batches) -> None:
        self._backend = backend
        self._ranks = ranks
        self._batches = batches
        self._coming: TrainBatch | None = None
        self._parts: list[TrainBatch] = []

    def fetch(self, header: Batch) -> None:
        """Have the share of a piece, and say so."""
        try:
            self._coming = self._batches.piece(header)
            flag = LACKS if self._coming is None else HAS
        except Stopped:
            flag = NO_BATCH
        self._ranks.gather(np.array([flag], np.int64))

    def add(self, stopping: Stopping, *, first: bool, last: bool) -> None:
        """Take the share in that was fetched."""
        assert self._coming is not None
        if first:
            self._backend.begin()
            self._parts.clear()
        self._parts.append(self._coming)
        self._backend.add(self._coming, stopping, last=last)

    def finish(self, header: Batch) -> None:
        """Take the step with all of them."""
        self._backend.finish(joined(self._parts, header), header.step)


def follow(backend: Sharded, ranks: Told, batches: Batches, stopping: Stopping) -> None:
    """Do what rank 0 tells, until it lets go.

    ``OutOfMemory`` after the run was told: rank 0 cannot say it, it may wait for this rank in the middle of a pass.
    """
    batch: TrainBatch | None = None
    parts = _Parts(backend, ranks, batches)
    while True:
        (kind, first, second, *_), text = ranks.hear()
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
                case Order.PIECE:
                    parts.fetch(_read(text))
                case Order.ADD:
                    parts.add(stopping, first=bool(first), last=bool(second))
                case Order.FINISH:
                    parts.finish(_read(text))
                case Order.GATHER:
                    backend.gather()
                case Order.SAVE:
                    backend.save(Path(text))
                    ranks.barrier()
                case Order.EVALUATE:
                    backend.evaluate(Version(first), stopping)
                case Order.END:
                    backend.close()
                    ranks.close()
                    return
        except Stopped:
            log.info("asked to end; rank 0 says when")
        except Untrainable as error:
            log.info("the step begins again, rank 0 reports it: %s", error)
        except OutOfMemory as error:
            batches.give_up(str(error))
            raise
