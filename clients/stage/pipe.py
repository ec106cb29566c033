"""What a reward runner and its child process say to each other: msgpack structs, each behind its length.

The pipe is private to one parent and one child on one host; messages are small, so a frame beyond ``MAX_FRAME`` means
that somebody else wrote to it.
"""

import struct
from typing import Any, BinaryIO

import msgspec

MAX_FRAME = 64 * 2**20
"""Bytes."""
LENGTH = struct.Struct("<I")


class Load(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """To the child, once: import this function. -> Loaded or NotLoaded"""

    run: str
    timeout_s: float


class Call(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """To the child: call the function on one sample. -> Answer"""

    id: int
    prompt: str
    completion: str
    columns: dict[str, Any]


class Loaded(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """From the child: ready. An ``async def`` may have many calls under way."""

    concurrent: bool


class NotLoaded(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """From the child: the function cannot be imported, and why. It ends after that."""

    why: str


class Answer(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """From the child: a finite number, or the reason why there is none."""

    id: int
    value: float = 0.0
    error: str = ""


class Hung(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """From the child, at its end: this call does not let go of the thread that it shares with the others."""

    id: int


ToChild = Load | Call
FromChild = Loaded | NotLoaded | Answer | Hung

to_child: msgspec.msgpack.Decoder[ToChild] = msgspec.msgpack.Decoder(ToChild)
from_child: msgspec.msgpack.Decoder[FromChild] = msgspec.msgpack.Decoder(FromChild)
_encode = msgspec.msgpack.Encoder().encode


def frame(message: ToChild | FromChild) -> bytes:
    """One message as it goes over the pipe."""
    body = _encode(message)
    return LENGTH.pack(len(body)) + body


def read(stream: BinaryIO) -> bytes | None:
    """The next message of a blocking stream, or None at its end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = stream.read(length)
    return body if len(body) == length else None
