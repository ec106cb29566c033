"""Weights of which every rank of a trainer has a part. Each rank uploads its own; no process holds the whole model.

Rank 0 begins the upload, sends its destination to the others, and commits once every rank has reported its spans.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from staleflow.clients.weights.tensors import NamedTensors
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.messages import BeginPublishReply, Manifest, WrittenSpan


class Span(NamedTuple):
    """Contiguous bytes of one tensor, at their offset in the version."""

    offset: int
    data: memoryview


class Spans(Protocol):
    """One rank's part of the weights."""

    def spans(self) -> Iterator[Span]:
        """Yield this rank's bytes, one span in main memory at a time. Over all ranks, each byte is in one span."""
        ...


class ShardedWeights(NamedTensors, Spans, Protocol):
    """One rank's view of the weights. Only ``items`` communicates with the other ranks."""

    def layout(self) -> Manifest:
        """Return the place of every tensor of the whole model, without digests; the same on every rank."""
        ...


@runtime_checkable
class LedWeights(ShardedWeights, Protocol):
    """The weights on rank 0, which leads the uploads of a version by all ranks. The methods block."""

    def start_uploads(self, *, copy: bool) -> Spans | None:
        """Order the other ranks to take part until ``end_uploads``. The weights must not change until then.

        ``copy``: every rank copies its part first, so that the weights may change after this call and the ranks execute
        other orders. Return the copies; None without ``copy``, or if rank 0 has no room for them.
        """
        ...

    def send_destination(self, to: BeginPublishReply) -> None:
        """Have the other ranks write their spans. Write rank 0's spans, then call ``collect``."""
        ...

    def collect(self, own: "RankUpload") -> "list[RankUpload]":
        """Wait until no rank writes any more, and return the outcome of each, in the order of the ranks."""
        ...

    def end_uploads(self) -> None:
        """Release the other ranks, after the last upload of the version."""
        ...


class RankUpload(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The spans that one rank has written, or the reason why it could not."""

    spans: list[WrittenSpan] = []
    arrived: int = 0
    """Bytes that arrived in chunks; 0 if they were written into the server's file."""
    code: Code | None = None
    """Code of the server's refusal."""
    errno: int = 0
    """Number of the error if the file system took no write."""
    detail: str = ""
    """The refusal or the error in words."""
    failure: str = ""
    """Any other error, which ends the trainer."""


def all_spans(uploads: Sequence[RankUpload]) -> list[WrittenSpan]:
    """Return the spans of every rank. Raise the first failure, if any: ``Refused``, ``OSError`` or ``RuntimeError``."""
    for rank, upload in enumerate(uploads):
        if upload.code is not None:
            raise Refused(upload.code, f"rank {rank}: {upload.detail}")
        if upload.errno:
            raise OSError(upload.errno, f"rank {rank}: {upload.detail}")
        if upload.failure:
            raise RuntimeError(f"rank {rank}: {upload.failure}")
    return [span for upload in uploads for span in upload.spans]
