"""JSON objects with a digest of themselves, for small files whose damage must be detected."""

import hashlib
from typing import Any

import msgspec

_DIGEST = "sha256"


def seal(content: Any) -> bytes:
    """Encode a struct or an object, with the sha256 of its canonical form in the key ``sha256``."""
    fields: dict[str, Any] = msgspec.to_builtins(content)
    sealed = msgspec.json.encode(fields | {_DIGEST: _digest(fields)})
    return msgspec.json.format(sealed, indent=2) + b"\n"


def unseal(raw: bytes) -> dict[str, Any]:
    """Return the object without its digest. ``ValueError`` if the bytes are not those that ``seal`` returned."""
    try:
        fields = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if fields.pop(_DIGEST, "") != _digest(fields):
        raise ValueError("its content does not match its digest")
    return fields


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(msgspec.json.encode(fields, order="sorted")).hexdigest()
