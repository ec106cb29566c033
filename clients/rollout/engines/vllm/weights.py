"""Pass published weights to vLLM's workers as places in files, since the workers are other processes.

- Tensors that are maps of a file on this host (the parameter server's, or the unnamed one of downloaded bytes) are
  passed by path and offset. Each worker maps the same file, so the only copy is the one into the model.
- Other tensors go through unnamed in-memory files of at most ``MAX_SPOOL_BYTES`` at a time. No mount limits these
  files, and they end with this process.
- A load is split into parcels, so that slow progress is distinguishable from a hang.

Numpy and the standard library only.
"""

import os
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_SPOOL_BYTES = 256 << 20
MAX_MAPPED_BYTES = 1 << 30
"""Maximum bytes of mapped tensors in a parcel; a single larger tensor forms its own parcel."""
MAPS = Path("/proc/self/maps")

Place = tuple[str, str, list[int], int]
"""Name, NumPy dtype, shape and offset of one tensor in a file, bytes in C order."""


@dataclass(slots=True)
class Parcel:
    """Tensors that lie in one file."""

    path: str
    tensors: list[Place] = field(default_factory=list[Place])

    def message(self) -> dict[str, Any]:
        """Return the message for the workers."""
        return {"path": self.path, "tensors": self.tensors}


@dataclass(frozen=True, slots=True)
class FileMap:
    """A range of this process's memory that maps a file, shared with all other processes that map it."""

    start: int
    end: int
    offset: int
    path: str


def parcels(tensors: Mapping[str, NDArray[Any]]) -> Generator[Parcel]:
    """Yield all tensors, in order. A parcel's in-memory file is closed when the next parcel is requested."""
    maps = file_maps()
    parcel: Parcel | None = None
    spool: dict[str, NDArray[Any]] = {}
    named = spooled = 0
    for name, array in tensors.items():
        if (place := _find_place(array, maps)) is not None:
            path, offset = place
            if parcel is None or parcel.path != path or named + array.nbytes > MAX_MAPPED_BYTES:
                if parcel is not None:
                    yield parcel
                parcel, named = Parcel(path), 0
            named += array.nbytes
            parcel.tensors.append((name, array.dtype.str, list(array.shape), offset))
            continue
        if spool and spooled + array.nbytes > MAX_SPOOL_BYTES:
            yield from _spool(spool)
            spool, spooled = {}, 0
        spool[name] = array
        spooled += array.nbytes
    if parcel is not None:
        yield parcel
    if spool:
        yield from _spool(spool)


def file_maps() -> list[FileMap]:
    """Return the shared maps of files that other processes can open, by their names or by descriptors of this
    process, which its maps of unnamed, replaced and deleted files keep open."""
    maps: list[FileMap] = []
    descriptors = _descriptors()
    for line in MAPS.read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or not fields[1].endswith("s"):
            continue
        start, _, end = fields[0].partition("-")
        major, _, minor = fields[3].partition(":")
        file = os.makedev(int(major, 16), int(minor, 16)), int(fields[4])
        path = fields[5] if _identity(fields[5]) == file else descriptors.get(file)
        if path is not None:
            maps.append(FileMap(int(start, 16), int(end, 16), int(fields[2], 16), path))
    return maps


def _descriptors() -> dict[tuple[int, int], str]:
    """Return the path by which other processes open each file that this process has open."""
    paths = [f"/proc/{os.getpid()}/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return {file: path for path in paths if (file := _identity(path)) is not None}


def _identity(path: str) -> tuple[int, int] | None:
    """Return device and inode of a file, or None if it does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _find_place(array: NDArray[Any], maps: list[FileMap]) -> tuple[str, int] | None:
    """Return the file and offset of a C-ordered array that lies in one of ``maps``, else None."""
    if not array.flags.c_contiguous or array.nbytes == 0:
        return None
    start = array.__array_interface__["data"][0]
    for one in maps:
        if one.start <= start and start + array.nbytes <= one.end:
            return one.path, one.offset + start - one.start
    return None


def _spool(tensors: Mapping[str, NDArray[Any]]) -> Iterator[Parcel]:
    """Yield the tensors as an in-memory file that lives until the next parcel. Workers open it through /proc."""
    with open(os.memfd_create("staleflow-weights"), "wb") as file:
        parcel = Parcel(f"/proc/{os.getpid()}/fd/{file.fileno()}")
        for name, array in tensors.items():
            parcel.tensors.append((name, array.dtype.str, list(array.shape), file.tell()))
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            file.write(bytes(-file.tell() % 64))
        file.flush()
        yield parcel
