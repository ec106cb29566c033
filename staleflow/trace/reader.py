"""Lines of a trace as plain objects with validated fields, for all readers except the auditor.

Additions of other versions of staleflow are kept: unknown fields, and unknown kinds of events, of which only the common
fields are checked.
"""

from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta, Struct

from staleflow.trace.events import AnyEvent

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


_KINDS = {str(kind.__struct_config__.tag): kind for kind in get_args(AnyEvent)}
_WHOLE = {
    tag: msgspec.defstruct(kind.__name__, _COMMON, bases=(kind,), tag_field="ev", tag=tag, kw_only=True, frozen=True)
    for tag, kind in _KINDS.items()
}
FIELDS = {tag: frozenset(kind.__struct_encode_fields__) for tag, kind in _KINDS.items()}
"""Names of each event's own fields, by kind."""

_decode = msgspec.json.Decoder(dict[str, Any]).decode


def decoded(raw: bytes) -> dict[str, Any]:
    """Return the object of one line. Raise ``msgspec.DecodeError`` with the reason; ``ValidationError`` for a bad
    field."""
    try:
        line = _decode(raw)
    except (RecursionError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(str(error)) from error
    kind = line.get("ev")
    msgspec.convert(line, _WHOLE.get(kind, _Common) if isinstance(kind, str) else _Common)
    return line


def complaint(error: msgspec.DecodeError) -> str:
    """Describe a line that ``decoded`` rejected."""
    return f"is not {'an event' if isinstance(error, msgspec.ValidationError) else 'JSON'}: {error}"
