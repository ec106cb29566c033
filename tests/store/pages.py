"""LMDB's pages as they lie in its file, for tests that change their headers."""

from pathlib import Path

PAGE = 4096
_FLAGS, _LOWER = 10, 12
_BRANCH = b"\x01\x00"
_TWO_CHILDREN = b"\x14\x00"


def harm_branches(file: Path, bit: int = 2) -> int:
    """One bit in the header of every branch page with two children; bit 2: it says that it has none, and LMDB ends
    whoever searches there (SIGABRT, by an assertion). Returns how many there are."""
    data, found = bytearray(file.read_bytes()), 0
    for start in range(0, len(data), PAGE):
        header = bytes(data[start : start + 16])
        if header[_FLAGS:_LOWER] == _BRANCH and header[_LOWER : _LOWER + 2] == _TWO_CHILDREN:
            data[start + _LOWER] ^= 1 << bit
            found += 1
    file.write_bytes(data)
    return found
