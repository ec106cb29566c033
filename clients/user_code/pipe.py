"""Messages between a worker and a process of user code: msgspec structs, each preceded by its length.

The pipe is private to one parent and one child on one host. Messages are small, so a frame beyond ``MAX_FRAME`` means
that user code wrote into the pipe.
"""

import struct
from typing import Any, BinaryIO

import msgspec

MAX_FRAME = 64 * 2**20
"""Maximum number of bytes of one message."""
LENGTH = struct.Struct("<I")


class Load(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """To the child, once: import this function, or make this class with ``options``. -> Loaded or NotLoaded"""

    run: str
    timeout_s: float
    options: dict[str, Any] = {}
    """Arguments of the class, or of every call of a stage."""
    stage: str = ""
    """Name of the stage, or of one of several reward functions."""
    makes: list[str] = []
    """For a stage: full names of its columns."""
    memory_mb: int = 0
    """Limit of the private memory of the process, in MiB; 0: none."""


class Call(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """To the child: call the function on one sample. -> Answer"""

    id: int
    prompt: str
    completion: str
    columns: dict[str, Any]
    facts: dict[str, Any] = {}
    """Arguments that the function gets if it names them (``configs.rewards``)."""


class ListCall(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """To the child: call a function that takes lists on some samples of one prompt. -> Answer"""

    id: int
    prompt: str | list[dict[str, Any]]
    """Text or messages, which all samples share."""
    completions: list[str]
    columns: list[dict[str, Any]]
    facts: list[dict[str, Any]]


class GroupCall(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """To the child: call the stage on one group. -> Answer"""

    id: int
    row: dict[str, Any]
    completions: list[str]
    payload: bytes
    """Packed arrays (``wire.tensors``): those of the group, and the columns that the stage needs."""


class Episode(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """To the child: run the environment on one row, with a client of this address and key. -> Answer"""

    id: int
    base_url: str
    api_key: str
    row: dict[str, Any]


class Cancel(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """To the child: the answer to this call is no longer needed; cancel it and confirm. -> Answer"""

    id: int


class Loaded(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """From the child: ready. ``concurrent``: the function is an ``async def``, so several calls may run at once."""

    concurrent: bool
    lists: bool = False
    """The function takes lists: ``ListCall`` in place of ``Call``."""


class NotLoaded(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """From the child: the function cannot be imported, and why. The child exits after that."""

    why: str


class Answer(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """From the child: a finite number (from an environment: several, by name), or the reason why there is none."""

    id: int
    value: float = 0.0
    error: str = ""
    columns: dict[str, float] = {}
    values: list[float] = []
    """From a function that takes lists: a finite number for each sample."""
    packed: bytes = b""
    """For a stage: its columns, packed, by their full names."""


class Hung(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """From the child, before it exits: this call blocks the thread that it shares with the others."""

    id: int


AnyCall = Call | ListCall | GroupCall | Episode
ToChild = Load | AnyCall | Cancel
FromChild = Loaded | NotLoaded | Answer | Hung

to_child: msgspec.msgpack.Decoder[ToChild] = msgspec.msgpack.Decoder(ToChild)
from_child: msgspec.msgpack.Decoder[FromChild] = msgspec.msgpack.Decoder(FromChild)
_encode = msgspec.msgpack.Encoder().encode


def frame(message: ToChild | FromChild) -> bytes:
    """Encode one message with its length."""
    body = _encode(message)
    return LENGTH.pack(len(body)) + body


def read(stream: BinaryIO) -> bytes | None:
    """Read the next message of a blocking stream; None at its end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = stream.read(length)
    return body if len(body) == length else None
