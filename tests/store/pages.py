"""LMDB's pages as they lie in its file, for tests that change their headers."""

from pathlib import Path

PAGE = 4096
_FLAGS, _LOWER = 10, 12
_BRANCH = b"\x01\x00"
_TWO_CHILDREN = b"\x14\x00"


def harm_branches(file: Path, bit: int = 2) -> int:
    """Flip one bit in the header of every branch page with two children; return the number of such pages.

    With bit 2 the header states that the page has no children, and a search that reaches it ends the process (SIGABRT,
    by an assertion of LMDB).
    """
    data, found = bytearray(file.read_bytes()), 0
    for start in range(0, len(data), PAGE):
        header = bytes(data[start : start + 16])
        if header[_FLAGS:_LOWER] == _BRANCH and header[_LOWER : _LOWER + 2] == _TWO_CHILDREN:
            data[start + _LOWER] ^= 1 << bit
            found += 1
    file.write_bytes(data)
    return found
