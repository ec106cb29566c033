"""Base types of all messages, and the messages that every server handles."""

from typing import Annotated

import msgspec

from staleflow.protocols.consistency.effects import Code

PROTOCOL = 17
"""Protocol version, raised by one whenever a message changes in meaning or shape. Both sides must have the same one."""

Sha = Annotated[str, msgspec.Meta(max_length=71)]
"""A digest of payload, ``blake3:`` and 64 hex digits; a hex sha256, of anything else; or empty."""

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
"""A count sent by a peer, bounded so that sums of many counts fit the 64 bits of the store and the trace."""


class Message(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Base of every member of the unions ``Request`` and ``Reply``."""


class Part(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """A piece of a message."""


class TensorSpec(Part, frozen=True, kw_only=True):
    """One raw little-endian array frame. Dtype (a closed set) and shape give its exact number of bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Ping(Message, frozen=True, kw_only=True):
    """Keep-alive that the transport sends every second in which it sent nothing else. -> Pong"""


class Pong(Message, frozen=True, kw_only=True):
    """Reply to ``Ping``."""


class Refusal(Message, frozen=True, kw_only=True):
    """A normal refusal, of any request. ``busy`` may be retried after ``retry_after_ms``; other codes are final."""

    code: Code
    detail: str = ""
    retry_after_ms: int = 0
    retry_for_ms: int = 0
    """Time after which a repeated ``busy`` is final; 0: it may be retried without limit."""


class Done(Message, frozen=True, kw_only=True):
    """Success, without a result."""


class Drain(Message, frozen=True, kw_only=True):
    """End the run: lease nothing new, train the groups in progress, keep everything acknowledged. -> Done"""

    why: str
