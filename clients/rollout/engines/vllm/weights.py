"""Published weights on their way into vLLM's workers: as places in files, since the workers are other processes.

- Tensors that are maps of a file of this host (the parameter server's) are named by path and offset, and each worker
  maps the same file: no byte is copied but into the model itself.
- Others (downloaded bytes) go through files in memory that have no name, ``SPOOL_BYTES`` at most at once: no mount
  bounds them, and they end with this process.
- A load is cut in parcels, so that one that gets on can be told from one that hangs.

Numpy and the standard library only.
"""

import os
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SPOOL_BYTES = 256 << 20
MAPPED_BYTES = 1 << 30
"""Of tensors in one map, in a parcel at most, but for one that is larger."""
MAPS = Path("/proc/self/maps")

Place = tuple[str, str, list[int], int]
"""Name, NumPy dtype, shape and offset of one tensor in a file, bytes in C order."""


@dataclass(slots=True)
class Parcel:
    """Tensors that lie in one file."""

    path: str
    tensors: list[Place] = field(default_factory=list[Place])

    def message(self) -> dict[str, Any]:
        """What the workers get."""
        return {"path": self.path, "tensors": self.tensors}


@dataclass(frozen=True, slots=True)
class FileMap:
    """A part of this process's memory that is a file's content, shared with everybody who maps it."""

    start: int
    end: int
    offset: int
    path: str


def parcels(tensors: Mapping[str, NDArray[Any]]) -> Generator[Parcel]:
    """All tensors, in order. A file of ours is gone when the next parcel is asked for."""
    maps = file_maps()
    parcel: Parcel | None = None
    spool: dict[str, NDArray[Any]] = {}
    named = spooled = 0
    for name, array in tensors.items():
        if (found := _place(array, maps)) is not None:
            path, offset = found
            if parcel is None or parcel.path != path or named + array.nbytes > MAPPED_BYTES:
                if parcel is not None:
                    yield parcel
                parcel, named = Parcel(path), 0
            named += array.nbytes
            parcel.tensors.append((name, array.dtype.str, list(array.shape), offset))
            continue
        if spool and spooled + array.nbytes > SPOOL_BYTES:
            yield from _spooled(spool)
            spool, spooled = {}, 0
        spool[name] = array
        spooled += array.nbytes
    if parcel is not None:
        yield parcel
    if spool:
        yield from _spooled(spool)


def file_maps() -> list[FileMap]:
    """The shared maps of files that are still what they were when they were mapped."""
    found: list[FileMap] = []
    for line in MAPS.read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or not fields[1].endswith("s"):
            continue
        start, _, end = fields[0].partition("-")
        major, _, minor = fields[3].partition(":")
        try:
            status = os.stat(fields[5])
        except OSError:
            continue
        if (status.st_ino, status.st_dev) == (int(fields[4]), os.makedev(int(major, 16), int(minor, 16))):
            found.append(FileMap(int(start, 16), int(end, 16), int(fields[2], 16), fields[5]))
    return found


def _place(array: NDArray[Any], maps: list[FileMap]) -> tuple[str, int] | None:
    """File and offset of an array in C order that is a map of one."""
    if not array.flags.c_contiguous or array.nbytes == 0:
        return None
    start = array.__array_interface__["data"][0]
    for one in maps:
        if one.start <= start and start + array.nbytes <= one.end:
            return one.path, one.offset + start - one.start
    return None


def _spooled(tensors: Mapping[str, NDArray[Any]]) -> Iterator[Parcel]:
    """The tensors as a file of their own, which lives until the next parcel. Others reach it through this process."""
    with open(os.memfd_create("staleflow-weights"), "wb") as file:
        parcel = Parcel(f"/proc/{os.getpid()}/fd/{file.fileno()}")
        for name, array in tensors.items():
            parcel.tensors.append((name, array.dtype.str, list(array.shape), file.tell()))
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            file.write(bytes(-file.tell() % 64))
        file.flush()
        yield parcel
