"""Uploads by every rank of a sharded trainer: destinations that rank 0 sends, and reports of the ranks.

A rank reports only after its last write, and rank 0 commits only after every report, so no rank writes into a version
that is visible. A rank that ends before its report ends rank 0 as well: the version never becomes visible.

Uploads have a channel of their own: other orders may be executed meanwhile, if the ranks upload copies.
"""

import logging
import threading
from collections.abc import Callable
from typing import Protocol

import msgspec

from staleflow.clients.weights.host_buffer import SpanCopies
from staleflow.clients.weights.sharded import RankUpload, ShardedWeights, Spans
from staleflow.protocols.wire.messages import BeginPublishReply

log = logging.getLogger(__name__)

WriteSpans = Callable[[BeginPublishReply, Spans], RankUpload]
"""Write this rank's spans to a destination and return the outcome."""
END = b""
"""Sent in place of a destination after the last one of a version."""


class UploadChannel(Protocol):
    """The communication between ranks about uploads."""

    def broadcast(self, data: bytes) -> bytes:
        """Return the bytes of rank 0; those of the others are ignored."""
        ...

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, in the order of the ranks."""
        ...


class LeaderUploads:
    """Rank 0's side, for one version at a time."""

    def __init__(self, channel: UploadChannel) -> None:
        self._channel = channel
        self._copies = SpanCopies()
        self._writing = False
        """The ranks have a destination and have not all reported."""
        self.active = False
        """The other ranks wait for a destination, or for the end."""

    def start(self, own: ShardedWeights, *, copy: bool) -> Spans | None:
        """Return copies of rank 0's spans, or None without ``copy`` or without room for them."""
        self.active = True
        return self._copies.copy(own) if copy else None

    def send(self, to: BeginPublishReply) -> None:
        """Have the other ranks write to this destination; call ``collect`` after rank 0's own write."""
        self._writing = True
        self._channel.broadcast(msgspec.json.encode(to))

    def collect(self, own: RankUpload) -> list[RankUpload]:
        """Return the outcome of every rank, once none writes any more."""
        every = self._channel.gather(msgspec.json.encode(own))
        self._writing = False
        return [msgspec.json.decode(outcome, type=RankUpload) for outcome in every]

    def end(self) -> None:
        """Release the other ranks. After an error between ``send`` and ``collect`` they detect the end of rank 0."""
        if not self._writing:
            self._channel.broadcast(END)
            self.active = False


class FollowerUploads:
    """The side of a rank above 0."""

    def __init__(self, channel: UploadChannel, write_spans: WriteSpans) -> None:
        self._channel = channel
        self._write_spans = write_spans
        self._copies = SpanCopies()
        self._thread: threading.Thread | None = None

    def take_part(self, weights: ShardedWeights, *, copy: bool) -> None:
        """Upload to every destination of the next version. Return at once if the spans can be copied, and ``copy``."""
        self.wait()
        copies = self._copies.copy(weights) if copy else None
        if copies is None:
            self._run(weights)
        else:
            self._thread = threading.Thread(target=self._run, args=(copies,), name="upload", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Return once no upload is in progress."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, spans: Spans) -> None:
        while (destination := self._channel.broadcast(END)) != END:
            to = msgspec.json.decode(destination, type=BeginPublishReply)
            try:
                outcome = self._write_spans(to, spans)
            except Exception as error:  # rank 0 waits for the report, and ends the trainer
                log.exception("part of a version not uploaded")
                outcome = RankUpload(failure=repr(error))
            self._channel.gather(msgspec.json.encode(outcome))
