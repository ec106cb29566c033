"""Digest of a payload, which names its algorithm: ``blake3:`` and 64 hex digits.

BLAKE3 is cryptographic, as SHA-256 is, and takes a third of its time on the payload of a group (decision 0044). A
digest without a prefix is SHA-256: such payload was stored by an earlier version of staleflow and stays readable.
"""

import hashlib
from collections.abc import Iterable

from blake3 import blake3

from staleflow.protocols.wire.codec import Data

_BLAKE3 = "blake3:"


def payload_digest(parts: Iterable[Data]) -> str:
    """Return the digest of a payload given as consecutive parts."""
    state = blake3()
    for part in parts:
        state.update(part)
    return _BLAKE3 + state.hexdigest()


def matches(data: Data, digest: str) -> bool:
    """Return True if a payload has this digest, by the algorithm that the digest names."""
    if digest.startswith(_BLAKE3):
        return payload_digest((data,)) == digest
    return hashlib.sha256(data).hexdigest() == digest


def shortened(digest: str) -> str:
    """Return the start of a digest, for messages to a person."""
    prefix = _BLAKE3 if digest.startswith(_BLAKE3) else ""
    return digest[: len(prefix) + 12]
