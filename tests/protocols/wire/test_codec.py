"""Any bytes decode to a message or raise a ProtocolError, never anything else."""

import types
from contextlib import suppress
from enum import Enum
from typing import Annotated, Any, Literal, NewType, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.codec import (
    ProtocolError,
    VersionError,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
)
from staleflow.protocols.wire.messages import (
    PROTOCOL,
    Done,
    GetStatus,
    Operations,
    Ping,
    Reply,
    Request,
    SchedulerStatus,
)

IDS = st.integers(0, 2**63 - 1)
PLAIN: dict[Any, SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=5),
    bytes: st.binary(max_size=5),
    type(None): st.none(),
    Any: st.one_of(st.none(), st.integers(0, 9), st.text(max_size=3), st.lists(st.integers(0, 9), max_size=3)),
}


def values(hint: Any) -> SearchStrategy[Any]:
    """Draw values of the types that messages are made of."""
    if hint in PLAIN:
        return PLAIN[hint]
    if isinstance(hint, NewType):
        return values(hint.__supertype__)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        (meta,) = hint.__metadata__
        return st.integers(meta.ge, meta.le) if meta.max_length is None else st.text(max_size=meta.max_length)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(values, args))
    if origin is Literal:
        return st.sampled_from(args)
    if origin is list:
        return st.lists(values(args[0]), max_size=3)
    if origin is tuple:
        if args[1:] == (...,):
            return st.lists(values(args[0]), max_size=3).map(tuple)
        return st.tuples(*map(values, args))
    if origin is dict:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    if issubclass(hint, Enum):
        return st.sampled_from(list(hint))
    hints = get_type_hints(hint, include_extras=True)
    return st.builds(hint, **{name: values(kind) for name, kind in hints.items() if name[0] != "_"})


@given(id=IDS, body=values(Request))
def test_every_request_comes_back_as_it_was(id: int, body: Request) -> None:
    assert decode_request(encode_request(id, body)) == (id, body)


@given(id=IDS, body=values(Reply))
def test_every_reply_comes_back_as_it_was(id: int, body: Reply) -> None:
    assert decode_reply(encode_reply(id, body)) == (id, body)


@given(data=st.binary(max_size=200))
def test_any_bytes_give_a_message_or_a_protocol_error(data: bytes) -> None:
    for decode in (decode_request, decode_reply):
        with suppress(ProtocolError):
            decode(data)


@given(body=values(Request), edits=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=4))
def test_a_damaged_message_gives_a_message_or_a_protocol_error(body: Request, edits: list[tuple[int, int]]) -> None:
    data = bytearray(encode_request(1, body))
    for position, value in edits:
        data[position % len(data)] = value
    for damaged in (bytes(data), bytes(data[:-1]), bytes(data) + b"\0"):
        with suppress(ProtocolError):
            decode_request(damaged)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x91" * 100_000, id="nested too deep"),
        pytest.param(b"\x93\x01\x02\x92\xaaOperations\xdd\xff\xff\xff\xff", id="four billion operations"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="four billion elements"),
        pytest.param(b"\x93\x01\x02\x91\xa4P\xffng", id="invalid UTF-8"),
        pytest.param(msgspec.msgpack.encode([PROTOCOL, 2, ["Unheard"]]), id="unknown request"),
        pytest.param(msgspec.msgpack.encode([PROTOCOL, 2, ["Ping", "more"]]), id="a field too many"),
        pytest.param(msgspec.msgpack.encode([PROTOCOL, 2, ["Ping"], 1]), id="an element too many"),
        pytest.param(msgspec.msgpack.encode([str(PROTOCOL), 2, ["Ping"]]), id="a version that is no number"),
    ],
)
def test_what_is_no_request_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_request(data)
    assert caught.value.code is Code.MALFORMED


def test_a_map_with_a_list_as_key_is_a_protocol_error() -> None:
    damaged = msgspec.msgpack.encode([PROTOCOL, 3, ["TrajectoriesStatus", 0, {}]])[:-1] + b"\x81\x91\x01\x02"
    with pytest.raises(ProtocolError):
        decode_reply(damaged)


def test_a_request_is_no_reply() -> None:
    with pytest.raises(ProtocolError):
        decode_reply(encode_request(1, GetStatus()))
    with pytest.raises(ProtocolError):
        decode_request(encode_reply(1, Done()))


def test_another_version_is_named_beside_our_own() -> None:
    data = msgspec.msgpack.encode([PROTOCOL + 6, 41, ["Ping"]])
    with pytest.raises(
        VersionError, match=f"the peer speaks protocol {PROTOCOL + 6}, this side speaks {PROTOCOL}"
    ) as e:
        decode_request(data)
    assert (e.value.theirs, e.value.id) == (PROTOCOL + 6, 41)


def test_another_version_is_recognised_in_a_message_that_this_one_cannot_read() -> None:
    data = msgspec.msgpack.encode([PROTOCOL + 1, 41, {"a": "shape"}, "of", "the future"])
    for decode in (decode_request, decode_reply):
        with pytest.raises(VersionError) as caught:
            decode(data)
        assert (caught.value.theirs, caught.value.id) == (PROTOCOL + 1, 41)


def test_an_unreadable_body_still_tells_which_request_it_was() -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_request(msgspec.msgpack.encode([PROTOCOL, 41, ["Report", 1]]))
    assert caught.value.id == 41


def test_headers_are_read_from_any_buffer() -> None:
    data = encode_request(1, Operations(ops=[]))
    assert decode_request(memoryview(data)) == decode_request(bytearray(data)) == (1, Operations(ops=[]))
    assert decode_reply(memoryview(encode_reply(1, SchedulerStatus(version=1)))) == (1, SchedulerStatus(version=1))
    assert decode_request(encode_request(0, Ping())) == (0, Ping())
