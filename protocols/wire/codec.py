"""Headers: any bytes give a message or a ``ProtocolError``, never anything else.

A header is the msgpack array ``[protocol, id, body]``; ``body`` is one struct of the union in ``messages``. The two
sides must speak the same protocol: another version is refused before anything else of the header is believed.
"""

from typing import Final

import msgspec

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.messages import PROTOCOL, Reply, Request

Data = bytes | bytearray | memoryview


class ProtocolError(Exception):
    """The peer's fault. ``id`` is that of the request, where it could be read."""

    def __init__(self, code: Code, detail: str, id: int = 0) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.id = id


class VersionError(ProtocolError):
    """The peer speaks another version of the protocol."""

    def __init__(self, theirs: int, id: int = 0) -> None:
        super().__init__(Code.MALFORMED, f"the peer speaks protocol {theirs}, this side speaks {PROTOCOL}", id)
        self.theirs = theirs


class _RequestEnvelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    protocol: int
    id: int
    body: Request


class _ReplyEnvelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    protocol: int
    id: int
    body: Reply


class _Prefix(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What every version of the protocol can read of every other."""

    protocol: int
    id: int = 0


_encoder: Final = msgspec.msgpack.Encoder()
_requests: Final = msgspec.msgpack.Decoder(_RequestEnvelope)
_replies: Final = msgspec.msgpack.Decoder(_ReplyEnvelope)
_prefixes: Final = msgspec.msgpack.Decoder(_Prefix)
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError, ValueError, TypeError)
"""All that msgspec raises for bytes that are not the expected value; a map key that is a list is a ``TypeError``."""


def encode_request(id: int, body: Request) -> bytes:
    """The header of a request."""
    return _encoder.encode((PROTOCOL, id, body))


def encode_reply(id: int, body: Reply) -> bytes:
    """The header of the answer to request ``id``; 0 answers what could not be read."""
    return _encoder.encode((PROTOCOL, id, body))


def decode_request(data: Data) -> tuple[int, Request]:
    """Id and body. ``VersionError`` (a ``ProtocolError``) if the peer speaks another version."""
    try:
        envelope = _requests.decode(data)
    except _UNREADABLE as error:
        raise _unreadable(data, error) from None
    if envelope.protocol != PROTOCOL:
        raise VersionError(envelope.protocol, envelope.id)
    return envelope.id, envelope.body


def id_of(data: Data) -> int:
    """The id in a header that is not read otherwise; 0 where there is none."""
    try:
        return _prefixes.decode(data).id
    except _UNREADABLE:
        return 0


def decode_reply(data: Data) -> tuple[int, Reply]:
    """Id and body. ``VersionError`` (a ``ProtocolError``) if the peer speaks another version."""
    try:
        envelope = _replies.decode(data)
    except _UNREADABLE as error:
        raise _unreadable(data, error) from None
    if envelope.protocol != PROTOCOL:
        raise VersionError(envelope.protocol, envelope.id)
    return envelope.id, envelope.body


def _unreadable(data: Data, error: Exception) -> ProtocolError:
    """Why the bytes are no message: another version, if at least that much can be read."""
    try:
        prefix = _prefixes.decode(data)
    except _UNREADABLE:
        return ProtocolError(Code.MALFORMED, f"not a message: {error}")
    if prefix.protocol != PROTOCOL:
        return VersionError(prefix.protocol, prefix.id)
    return ProtocolError(Code.MALFORMED, f"not a message: {error}", prefix.id)
