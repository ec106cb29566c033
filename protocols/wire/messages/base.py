"""What every message is made of, and the messages that every server answers."""

from typing import Annotated, Any

import msgspec

from staleflow.protocols.consistency.effects import Code

PROTOCOL = 12
"""Raised by one whenever a message changes meaning or shape; the two sides must agree exactly."""

Sha = Annotated[str, msgspec.Meta(max_length=64)]
"""A sha256 in hexadecimal, or empty."""

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
"""What a peer counts: never so much that a sum of many leaves the 64 bits that a store and a trace have for it."""


class Message(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Base of everything in the union."""


class Part(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """A piece of a message."""


class TensorSpec(Part, frozen=True, kw_only=True):
    """One raw little-endian array frame: closed dtype, shape, and so its exact number of bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Ping(Message, frozen=True, kw_only=True):
    """Am I heard? -> Pong. Sent by the transport every second in which nothing else was sent."""


class Pong(Message, frozen=True, kw_only=True):
    """Yes."""


class Refusal(Message, frozen=True, kw_only=True):
    """A normal no, to any request. ``busy`` may be tried again after ``retry_after_ms``; the others will not change."""

    code: Code
    detail: str = ""
    retry_after_ms: int = 0
    retry_for_ms: int = 0
    """After this long of the same answer, ``busy`` is final; 0: it may be tried again without end."""


class Done(Message, frozen=True, kw_only=True):
    """Yes, and there is nothing more to say."""


class GetStatus(Message, frozen=True, kw_only=True):
    """-> Status, from any server."""


class Status(Message, frozen=True, kw_only=True):
    """A plain snapshot; what is in it is said where the server makes it."""

    values: dict[str, Any]


class Drain(Message, frozen=True, kw_only=True):
    """End the run: lease nothing new, train what is under way, keep what is acknowledged. -> Done"""

    why: str
