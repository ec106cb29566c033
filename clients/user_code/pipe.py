"""What a worker and a process of user code say to each other: msgpack structs, each behind its length.

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
    """To the child, once: import this function, or make this class with ``options``. -> Loaded or NotLoaded"""

    run: str
    timeout_s: float
    options: dict[str, Any] = {}
    """Of the class, or of every call of a stage."""
    stage: str = ""
    makes: list[str] = []
    """Of a stage: its columns by their full names."""
    memory_mb: int = 0
    """Most private memory of the process, in MiB; 0 sets no limit."""


class Call(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """To the child: call the function on one sample. -> Answer"""

    id: int
    prompt: str
    completion: str
    columns: dict[str, Any]


class GroupCall(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """To the child: call the stage on one group. -> Answer"""

    id: int
    row: dict[str, Any]
    completions: list[str]
    payload: bytes
    """Packed arrays (``wire.tensors``): the group's, and the columns that the stage needs."""


class Episode(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """To the child: let the environment play one row, with a client of this address and key. -> Answer"""

    id: int
    base_url: str
    api_key: str
    row: dict[str, Any]


class Cancel(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """To the child: nobody wants the answer to this call any more; end it and say so. -> Answer"""

    id: int


class Loaded(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """From the child: ready. An ``async def`` may have many calls under way."""

    concurrent: bool


class NotLoaded(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """From the child: the function cannot be imported, and why. It ends after that."""

    why: str


class Answer(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """From the child: a finite number (of an environment: some, by name), or the reason why there is none."""

    id: int
    value: float = 0.0
    error: str = ""
    columns: dict[str, float] = {}
    made: bytes = b""
    """Of a stage: its columns, packed, by their full names."""


class Hung(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """From the child, at its end: this call does not let go of the thread that it shares with the others."""

    id: int


ToChild = Load | Call | GroupCall | Episode | Cancel
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
