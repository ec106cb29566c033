"""What a rank above 0 trains on. Consumes the term and the version that rank 0 tells it; fetches its own shares."""

from collections.abc import Callable

from staleflow.clients.trainer.backends.base import Drained, NoBatch, Stopped
from staleflow.clients.trainer.client import TrainerClient
from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.clients.trainer.data.micro_batches import PieceStream
from staleflow.clients.trainer.prefetch import BatchStream
from staleflow.protocols.consistency.ids import Step, TrainerTerm, Version
from staleflow.protocols.wire.messages import Batch


class Followed:
    """What a rank above 0 trains on: batches, one fetched ahead, or its shares of pieces that rank 0 tells it."""

    def __init__(self, client: TrainerClient, steps: int, *, streaming: bool) -> None:
        self._client = client
        self._steps = steps
        self._streaming = streaming
        self._pieces: PieceStream | None = None
        self._stream: BatchStream | None = None
        self._end: Callable[[], object] = lambda: None
        self._step = -1
        self._term: TrainerTerm | None = None

    def follow(self, term: TrainerTerm, version: Version) -> None:
        """Batches from this version on, for this term."""
        self._end()
        self._term = term
        if self._streaming:
            self._pieces = self._client.pieces(term)
            return
        self._stream, self._end = self._client.follow(term, version, self._steps)
        self._step = -1

    def batch(self, step: Step) -> TrainBatch | None:
        """That of the next step, or anew that of the same one; None once this process was asked to end, where the run
        drains and rank 0's batch was taken back meanwhile, and after the run was told that there can be none."""
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

    def piece(self, header: Batch) -> TrainBatch | None:
        """The share of these groups; None when it cannot be fetched. ``Stopped`` once this process was asked to end,
        or after the run was told that there can be none."""
        assert self._pieces is not None
        try:
            return self._client.wait(self._pieces.data(header))
        except NoBatch as error:
            self.give_up(str(error))
            raise Stopped from error

    def give_up(self, why: str) -> None:
        """Tell the run that this rank cannot go on: it drains."""
        assert self._term is not None
        self._client.finished(why, self._term)
