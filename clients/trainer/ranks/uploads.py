"""Upload of a version by every rank of a sharded trainer: rank 0's order with its destination, and the ranks' reports.

A rank reports only after its last write, and rank 0 commits only after every report, so no rank writes into a version
that is visible. A rank that ends before its report ends rank 0 as well: the version never becomes visible.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec
import numpy as np

from staleflow.clients.trainer.backends.base import Array
from staleflow.clients.weights.sharded import RankUpload, ShardedWeights
from staleflow.protocols.wire.messages import BeginPublishReply

WriteSpans = Callable[[BeginPublishReply, ShardedWeights], RankUpload]
"""Write this rank's spans of an upload and return the outcome."""


class Gathering(Protocol):
    """The communication between ranks that this module needs."""

    def gather(self, values: Array) -> Array: ...


def encode_destination(to: BeginPublishReply) -> str:
    """Return the text of an order to upload."""
    return msgspec.json.encode(to).decode()


def decode_destination(text: str) -> BeginPublishReply:
    """Return the destination of an order to upload."""
    return msgspec.json.decode(text, type=BeginPublishReply)


def report(ranks: Gathering, own: RankUpload) -> Iterable[bytes]:
    """Send this rank's outcome to the others; return that of each, encoded, in the order of the ranks."""
    line = msgspec.json.encode(own) + b"\n"  # JSON has no other line end
    return ranks.gather(np.frombuffer(line, np.uint8)).tobytes().splitlines()


def collect(ranks: Gathering, own: RankUpload) -> list[RankUpload]:
    """Send rank 0's outcome to the others; return that of each, in the order of the ranks."""
    return [msgspec.json.decode(line, type=RankUpload) for line in report(ranks, own)]
