"""Encoding and decoding of headers. Any bytes decode to a message or raise ``ProtocolError``, nothing else.

A header is the msgpack array ``[protocol, id, body]``; ``body`` is one struct of the union in ``messages``. Both sides
must use the same protocol version: another version is refused before any other field of the header is used.
"""

from typing import Final

import msgspec

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.messages import PROTOCOL, Reply, Request

Data = bytes | bytearray | memoryview


class ProtocolError(Exception):
    """A fault of the peer. ``id`` is the id of the request if it could be read, else 0."""

    def __init__(self, code: Code, detail: str, id: int = 0) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.id = id


class VersionError(ProtocolError):
    """The peer uses another version of the protocol."""

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
    """The part of a header that every version of the protocol can read."""

    protocol: int
    id: int = 0


_encoder: Final = msgspec.msgpack.Encoder()
_requests: Final = msgspec.msgpack.Decoder(_RequestEnvelope)
_replies: Final = msgspec.msgpack.Decoder(_ReplyEnvelope)
_prefixes: Final = msgspec.msgpack.Decoder(_Prefix)
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError, ValueError, TypeError)
"""All exceptions that msgspec raises for unexpected bytes; a map key that is a list raises ``TypeError``."""


def encode_request(id: int, body: Request) -> bytes:
    """Return the header of a request."""
    return _encoder.encode((PROTOCOL, id, body))


def encode_reply(id: int, body: Reply) -> bytes:
    """Return the header of the reply to request ``id``; 0 if the request could not be read."""
    return _encoder.encode((PROTOCOL, id, body))


def decode_request(data: Data) -> tuple[int, Request]:
    """Return id and body. Raises ``VersionError`` (a ``ProtocolError``) if the peer uses another version."""
    try:
        envelope = _requests.decode(data)
    except _UNREADABLE as error:
        raise _unreadable(data, error) from None
    if envelope.protocol != PROTOCOL:
        raise VersionError(envelope.protocol, envelope.id)
    return envelope.id, envelope.body


def id_of(data: Data) -> int:
    """Return the id of a header that cannot be decoded as a whole; 0 if it has none."""
    try:
        return _prefixes.decode(data).id
    except _UNREADABLE:
        return 0


def decode_reply(data: Data) -> tuple[int, Reply]:
    """Return id and body. Raises ``VersionError`` (a ``ProtocolError``) if the peer uses another version."""
    try:
        envelope = _replies.decode(data)
    except _UNREADABLE as error:
        raise _unreadable(data, error) from None
    if envelope.protocol != PROTOCOL:
        raise VersionError(envelope.protocol, envelope.id)
    return envelope.id, envelope.body


def _unreadable(data: Data, error: Exception) -> ProtocolError:
    """Return the error for bytes that are no message: ``VersionError`` if at least the prefix can be read."""
    try:
        prefix = _prefixes.decode(data)
    except _UNREADABLE:
        return ProtocolError(Code.MALFORMED, f"not a message: {error}")
    if prefix.protocol != PROTOCOL:
        return VersionError(prefix.protocol, prefix.id)
    return ProtocolError(Code.MALFORMED, f"not a message: {error}", prefix.id)
