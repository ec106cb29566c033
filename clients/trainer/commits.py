"""The versions of one trainer: the newest one, and at most one more that is being published."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar, cast

from staleflow.clients.background import Background, within
from staleflow.clients.trainer.backends.base import Published, Stopped
from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.clients.trainer.errors import raise_refusal
from staleflow.clients.trainer.publication import Publication
from staleflow.clients.weights import Publisher
from staleflow.clients.weights.sharded import RankUpload, Spans
from staleflow.net.errors import Refused, Unavailable
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import BatchId, Lineage, TrainerTerm, Version
from staleflow.protocols.wire.messages import Batch, BeginPublishReply

log = logging.getLogger(__name__)

T = TypeVar("T")

COMMIT_TIMEOUT_S = 5.0
"""Maximum duration of a commit in progress after a stop request."""
STATUS_TIMEOUT_S = 1.0


class Commits:
    """Publish versions for ``TrainerClient``.

    Calls block. They belong to the trainer's thread, except ``write_spans`` and the function that ``result`` returns.
    """

    def __init__(self, thread: Background) -> None:
        self._thread = thread
        self.publisher: Publisher | None = None
        """The connection to the parameter server, once attached."""
        self.version = Version(0)
        """Version of the trainer's weights, as known to the run."""
        self._lineage = Lineage(0)
        """Lineage of that version; the run's own lineage is higher after a rollback."""
        self._published: tuple[Mapping[str, Any] | Published, BatchId | None] | None = None
        """The weights of ``version`` and the batch that produced them, while they have the bytes of that version."""
        self.publication: Publication | None = None
        """The version after ``version``, while it is being published."""
        self.publish_s: float | None = None
        """Duration of the last publication, until it is sent with the metrics of its step."""

    def joined(self, lineage: Lineage, version: Version) -> None:
        """Continue from the version with which the trainer has joined."""
        self.version, self._lineage = version, lineage
        self._published = None  # the weights of an earlier term are not those of the joined version

    def holds(self, weights: Mapping[str, Any] | Published) -> None:
        """Provide the weights of ``version``, to publish them again if they are lost."""
        self._published = weights, None

    def publish(
        self,
        weights: Mapping[str, Any] | Published,
        term: TrainerTerm,
        lineage: Lineage,
        version: Version,
        batch: BatchId | None,
    ) -> None:
        """Publish a version and wait until it is stored."""
        assert self.publisher is not None
        publish = self.publisher.publish(
            as_weights(weights), trainer_term=term, lineage=lineage, version=version, batch=batch
        )
        try:
            self._wait(publish)
        except Refused as refused:
            raise_refusal(refused, version)
        self.version, self._lineage = version, lineage
        self._published = weights, batch

    def begin(
        self, weights: Mapping[str, Any] | Published, term: TrainerTerm, lineage: Lineage, batch: TrainBatch | Batch
    ) -> Publication:
        """Start to publish the weights trained on ``batch``. No other version may be under way."""
        assert self.publisher is not None
        given = as_weights(weights)
        publication = Publication(
            lineage=lineage,
            version=Version(batch.step + 1),
            batch=batch,
            weights=weights,
            gathered=not isinstance(given, Mapping),
        )
        publish = self.publisher.publish(
            given,
            trainer_term=term,
            lineage=publication.lineage,
            version=publication.version,
            batch=batch.batch,
            released=publication.read.set,
        )
        self._published = None  # the weights are those of the next version
        self.publication, self.publish_s = publication, None
        publication.started(self._thread.start(publication.run(publish)))
        return publication

    def wait_read(self, publication: Publication) -> None:
        """Wait until the weights of a publication are not read any more."""
        self._wait_for(publication, publication.read)

    def before_update(self) -> None:
        """Wait until the weights under way may change. From now on nothing has the bytes of the newest version."""
        if (publication := self.publication) is not None:
            self.wait_read(publication)
            publication.weights = None
            self.settle()
        self._published = None

    def finish(self) -> None:
        """Wait until the version under way is stored, or raise the error that ended its publication."""
        if (publication := self.publication) is not None:
            self._wait_for(publication, publication.done)
            self.settle()

    def settle(self) -> None:
        """Count the version of a publication that has ended, or raise the error that ended it."""
        publication = self.publication
        if publication is None or not publication.done.is_set():
            return
        self.publication = None
        publication.raise_error()
        self.version, self._lineage = publication.version, publication.lineage
        self.publish_s = publication.seconds
        if publication.weights is not None:
            self._published = publication.weights, publication.batch.batch

    def forget(self) -> None:
        """Wait for the publication of an earlier term. Its outcome does not matter: the scheduler knows it."""
        if (publication := self.publication) is not None:
            self._wait_for(publication, publication.done)
            self.publication = None

    def cancel(self) -> None:
        """Do not wait for the version under way any more."""
        if self.publication is not None:
            self.publication.cancel(Stopped())
            self.publication = None

    def result(self) -> Callable[[], None]:
        """Return a function for any thread that waits for the version under way, and raises as ``finish``."""
        publication = self.publication

        def wait() -> None:
            if publication is not None:
                publication.join()
                publication.raise_error()

        return wait

    def republish_damaged(self, term: TrainerTerm) -> None:
        """Publish the newest version again if its bytes were lost or damaged, and this process still has them.

        It does not while the next version is being published: that one replaces it, and needs no rollout.
        """
        assert self.publisher is not None
        if self.publication is not None:
            return
        lineage, version = self._lineage, self.version
        check = within(STATUS_TIMEOUT_S, self.publisher.damaged(lineage, version))
        if not self._thread.wait(check, 0.0, Stopped) or self._published is None:
            return
        weights, batch = self._published
        log.warning(
            "version %d of lineage %d is lost or damaged at the parameter server: published again", version, lineage
        )
        try:
            self.publish(weights, term, lineage, version, batch)
        except Refused as refused:
            if refused.code is not Code.CONFLICT:
                raise
            log.error("version %d cannot be published again: %s", version, refused.detail)

    def write_spans(self, to: BeginPublishReply, weights: Spans) -> RankUpload:
        """Upload this rank's part of a version that rank 0 has begun. Thread-safe."""
        assert self.publisher is not None
        return self._wait(self.publisher.write_spans(to, weights))

    def close(self) -> None:
        """Close the connection to the parameter server."""
        if self.publisher is not None:
            self.publisher.close()

    def _wait_for(self, publication: Publication, event: asyncio.Event) -> None:
        """Wait for an event of a publication. ``Unavailable`` a while after a stop request, which cancels it."""
        if event.is_set():  # waiting for it would still cost two changes of threads
            return
        try:
            self._wait(event.wait())
        except Unavailable as error:
            publication.cancel(error)
            self.publication = None
            raise

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        return self._thread.wait(call, COMMIT_TIMEOUT_S, _not_in_time)


def _not_in_time() -> Exception:
    return Unavailable("the parameter server", COMMIT_TIMEOUT_S, "stop requested while a version was being published")


def as_weights(weights: Mapping[str, Any] | Published) -> Published:
    """Convert torch tensors to arrays; return arrays unchanged."""
    if not isinstance(weights, Mapping):
        return weights
    given = cast(Mapping[str, Any], weights)
    if any(hasattr(value, "detach") for value in given.values()):
        from staleflow.clients.trainer.backends.tensors import to_arrays

        return to_arrays(given)
    return given
