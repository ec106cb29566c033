"""Data of a rank above 0. Consumes the term and version that rank 0 sends; fetches its own shares."""

from collections.abc import Callable

from staleflow.clients.trainer.backends.base import Stopped
from staleflow.clients.trainer.client import TrainerClient
from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.clients.trainer.data.micro_batches import MicroBatchStream
from staleflow.clients.trainer.data.prefetch import BatchStream, Drained, NoBatch
from staleflow.protocols.consistency.ids import Step, TrainerTerm, Version
from staleflow.protocols.wire.messages import Batch


class FollowerBatches:
    """Batches of a rank above 0, one prefetched, or its shares of the micro-batches that rank 0 announces."""

    def __init__(self, client: TrainerClient, steps: int, *, streaming: bool) -> None:
        self._client = client
        self._steps = steps
        self._streaming = streaming
        self._micro_batches: MicroBatchStream | None = None
        self._stream: BatchStream | None = None
        self._end: Callable[[], object] = lambda: None
        self._step = -1
        self._term: TrainerTerm | None = None

    def follow(self, term: TrainerTerm, version: Version) -> None:
        """Start fetching batches from this version on, for this term."""
        self._end()
        self._term = term
        if self._streaming:
            self._micro_batches = self._client.micro_batches(term)
            return
        self._stream, self._end = self._client.follow(term, version, self._steps)
        self._step = -1

    def batch(self, step: Step) -> TrainBatch | None:
        """Return the batch of the next step, or the current one again.

        Return None after a stop request, if the run drains and rank 0's batch was revoked meanwhile, and after
        reporting to the run that there can be no batch.
        """
        assert self._stream is not None
        coming = self._stream.get() if step != self._step else self._stream.fetch(step)
        self._step = int(step)
        try:
            return self._client.wait(coming)
        except (Stopped, Drained):
            return None
        except NoBatch as error:
            self.give_up(str(error))
            return None

    def micro_batch(self, header: Batch) -> TrainBatch | None:
        """Return the share of these groups; None if it cannot be fetched.

        Raise ``Stopped`` after a stop request, or after reporting to the run that there can be no batch.
        """
        assert self._micro_batches is not None
        try:
            return self._client.wait(self._micro_batches.data(header))
        except NoBatch as error:
            self.give_up(str(error))
            raise Stopped from error

    def give_up(self, why: str) -> None:
        """Report to the run that this rank cannot continue, so that it drains."""
        assert self._term is not None
        self._client.finished(why, self._term)
