"""Base of every table of a configuration, and the bounds that many keys share.

Every key that sizes something has an upper bound, far above any sensible value. A typing error is then rejected by name
before anything starts, instead of overflowing a message, a map or a clock later.
"""

from typing import Annotated, Final

from msgspec import Meta, Struct

MOST: Final = 10**9
"""Largest number of any key: the product of any two still fits 64 bits."""

NonNegative = Annotated[int, Meta(ge=0, le=MOST)]
Positive = Annotated[int, Meta(ge=1, le=MOST)]
NonNegativeFloat = Annotated[float, Meta(ge=0, le=MOST)]
PositiveFloat = Annotated[float, Meta(gt=0, le=MOST)]
Share = Annotated[float, Meta(ge=0, le=1)]
Processes = Annotated[int, Meta(ge=1, le=4096)]
"""Number of processes, threads or machines, limited to what a kernel and a scheduler can handle."""
Threads = Annotated[int, Meta(ge=0, le=4096)]
"""Number of threads of a process; 0: chosen from the cores of the machine."""
MAX_GROUPS: Final = 1 << 20
Groups = Annotated[int, Meta(ge=1, le=MAX_GROUPS)]
"""Number of groups or samples held at once; each takes some bytes in memory and in one message."""
Calls = Annotated[int, Meta(ge=1, le=1 << 20)]
"""Number of concurrent calls of user code; each takes a task, and a connection if it calls a network service."""
Mebibytes = Annotated[int, Meta(ge=1, le=1 << 22)]
"""MiB, at most 4 TiB, so that a map of this size fits the address space of a process beside others."""
Seconds = Annotated[float, Meta(ge=0.001, le=7 * 24 * 3600)]
"""A waiting time, from a millisecond (the clock's unit) to a week (``epoll`` counts to 24 days)."""
Seed = Annotated[int, Meta(ge=0, le=2**32 - 1)]
"""A seed that every generator accepts, including NumPy's in user code."""
Text = Annotated[str, Meta(pattern=r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]*\Z")]
"""A name, path or address without control characters: no file name contains a NUL, and a line break would end a line of
logs and scripts."""
Lines = Annotated[str, Meta(pattern=r"\A[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]*\Z")]
"""A text that may have line ends and tabs."""
StopString = Annotated[
    str, Meta(max_length=1000, pattern=r"\A[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+\Z")
]
"""A text that ends a completion; unlike ``Text`` it is not empty, and may contain line ends and tabs."""


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every table of the configuration file."""
