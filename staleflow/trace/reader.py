"""Lines of a trace with validated fields, typed or as written, for all readers except the auditor.

Additions of other versions of staleflow are accepted: unknown fields, and unknown kinds of events, of which only the
common fields are checked.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args

import msgspec
from msgspec import Meta, Struct

from staleflow.configs.errors import ConfigError
from staleflow.trace.events import AnyEvent

T = TypeVar("T")

_Ns = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Number = Annotated[int, Meta(ge=0, le=2**50)]
_COMMON = (("run", str), ("inc", _Number), ("seq", _Number), ("t", _Ns), ("m", _Ns))


class _Common(Struct):
    """Fields of every line."""

    run: str
    inc: _Number
    seq: _Number
    t: _Ns
    m: _Ns
    ev: str


class Line(NamedTuple):
    """One line of a trace."""

    run: str
    inc: int
    """Number of the scheduler's incarnation."""
    seq: int
    t: int
    """Nanoseconds of Unix time."""
    m: int
    """Nanoseconds of the monotonic clock."""
    ev: str
    """Kind of the event."""
    event: AnyEvent | None
    """None if the kind is unknown."""


_KINDS = {str(kind.__struct_config__.tag): kind for kind in get_args(AnyEvent)}
_WHOLE = tuple(
    msgspec.defstruct(kind.__name__, _COMMON, bases=(kind,), tag_field="ev", tag=tag, kw_only=True, frozen=True)
    for tag, kind in _KINDS.items()
)
FIELDS = {tag: frozenset(kind.__struct_encode_fields__) for tag, kind in _KINDS.items()}
"""Names of each event's own fields, by kind."""

_decode_known = msgspec.json.Decoder[Any](Union[_WHOLE]).decode  # noqa: UP007
_decode_common = msgspec.json.Decoder(_Common).decode
_decode_dict = msgspec.json.Decoder(dict[str, Any]).decode


def typed(raw: bytes) -> Line:
    """Return one line. Raise ``msgspec.DecodeError`` with the reason; ``ValidationError`` for a bad field."""
    try:
        whole = _decoded(_decode_known, raw)
    except msgspec.ValidationError:
        common = _decoded(_decode_common, raw)
        if common.ev in _KINDS:
            raise
        return Line(common.run, common.inc, common.seq, common.t, common.m, common.ev, None)
    return Line(whole.run, whole.inc, whole.seq, whole.t, whole.m, whole.__struct_config__.tag, whole)


def as_written(raw: bytes) -> dict[str, Any]:
    """Return the object of one line, with unknown fields; raises like ``typed``."""
    typed(raw)
    return _decoded(_decode_dict, raw)


def _decoded(decode: Callable[[bytes], T], raw: bytes) -> T:
    try:
        return decode(raw)
    except (RecursionError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(str(error)) from error


def complaint(error: msgspec.DecodeError) -> str:
    """Describe a line that ``typed`` rejected."""
    return f"is not {'an event' if isinstance(error, msgspec.ValidationError) else 'JSON'}: {error}"


def read_lines(path: Path) -> Iterator[Line]:
    """Yield every line of a trace, unaudited. Raise ``ConfigError`` with the number of a line that is not an event: no
    JSON, a missing field, or one of another type.

    A last line without a line feed is still being written and is left out.
    """
    return _read(path, typed)


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Like ``read_lines``, as written: unknown fields are kept."""
    return _read(path, as_written)


def _read(path: Path, decode: Callable[[bytes], T]) -> Iterator[T]:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    yield decode(line)
                except msgspec.DecodeError as error:
                    if not line.endswith(b"\n"):
                        return
                    raise ConfigError("trace", str(path), f"line {number} {complaint(error)}") from error
    except OSError as error:
        raise ConfigError("trace", str(path), f"it cannot be read: {error.strerror}") from error
