"""Independent reader of the stores' bytes, written from the description of the file format and lmdb alone.

A payload is stored under ``group || lease`` (two big-endian 64-bit numbers), in two parts. ``records`` holds its
metadata, preceded by the sha256 of key and metadata. The blob lies in the file ``slab`` of the folder ``slabs`` that
the record names, starting at byte ``offset``, or else in ``payloads``. A blob consists of ``sfa1``, the length of its
description, the description (msgpack: name, dtype, shape of each array, sorted by name), and the arrays, each at a
multiple of 64 bytes. Its digest is ``blake3:`` and the hex BLAKE3 of the blob.
"""

import hashlib
import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import msgspec
import numpy as np
from blake3 import blake3

from tests.audit.prf import Array


class Stored(NamedTuple):
    """One payload as stored in a shard's file."""

    group: int
    lease: int
    blob: bytes
    record: dict[str, Any]
    """The record of the payload; empty if it does not match its sha256."""

    @property
    def sha(self) -> str:
        return "blake3:" + blake3(self.blob).hexdigest()

    def arrays(self) -> dict[str, Array]:
        return unpacked(self.blob)


def read_shard(folder: Path) -> dict[tuple[int, int], Stored]:
    """Return every payload of a shard that no process currently has open for writing."""
    environment: Any = lmdb.Environment(str(folder), readonly=True, lock=False, max_dbs=8)
    try:
        payloads = environment.open_db(b"payloads", create=False)
        records = environment.open_db(b"records", create=False)
        with environment.begin() as view:
            found: dict[tuple[int, int], Stored] = {}
            for key, blob in view.cursor(db=payloads):
                group, lease = struct.unpack(">QQ", key)
                found[group, lease] = Stored(group, lease, bytes(blob), _record(key, view.get(key, db=records)))
            for key, value in view.cursor(db=records):
                record = _record(key, value)
                if record.get("slab"):
                    group, lease = struct.unpack(">QQ", key)
                    found[group, lease] = Stored(group, lease, _in_slab(folder, record), record)
            return found
    finally:
        environment.close()


def _in_slab(folder: Path, record: dict[str, Any]) -> bytes:
    with (folder / "slabs" / str(record["slab"])).open("rb") as file:
        file.seek(record["offset"])
        return file.read(record["nbytes"])


def _record(key: bytes, value: bytes | None) -> dict[str, Any]:
    if value is None or hashlib.sha256(key + value[32:]).digest() != value[:32]:
        return {}
    record: dict[str, Any] = msgspec.msgpack.decode(value[32:])
    return record


def unpacked(blob: bytes) -> dict[str, Array]:
    """Return the arrays of a blob."""
    magic, length = struct.unpack_from("<4sI", blob)
    assert magic == b"sfa1", magic
    place = 8 + length
    found: dict[str, Array] = {}
    described: list[tuple[str, str, tuple[int, ...]]] = msgspec.msgpack.decode(blob[8:place])
    for name, dtype, shape in described:
        place += -place % 64
        kind = np.dtype(dtype).newbyteorder("<")
        count = math.prod(shape)
        found[name] = np.frombuffer(blob, kind, count, place).reshape(shape)
        place += count * kind.itemsize
    assert place == len(blob), f"{len(blob) - place} bytes follow the last array"
    return found


def versions_in(folder: Path) -> set[tuple[int, int]]:
    """Return (lineage, version) of every version in the parameter server's folder."""
    found: set[tuple[int, int]] = set()
    for path in folder.glob("*.json"):
        lineage, _, version = path.stem.partition("-")
        found.add((int(lineage), int(version)))
    return found
