"""What every table of a configuration is, and the bounds that many of their keys share.

Whatever sizes something has an upper bound, far beyond what anybody means: a slip of the finger is then refused by
name, before anything starts, where it would overflow a message, a map or a clock later.
"""

from typing import Annotated, Final

from msgspec import Meta, Struct

MOST: Final = 10**9
"""No number is larger: the product of any two still fits 64 bits."""

NonNegative = Annotated[int, Meta(ge=0, le=MOST)]
Positive = Annotated[int, Meta(ge=1, le=MOST)]
NonNegativeFloat = Annotated[float, Meta(ge=0, le=MOST)]
PositiveFloat = Annotated[float, Meta(gt=0, le=MOST)]
Share = Annotated[float, Meta(ge=0, le=1)]
Processes = Annotated[int, Meta(ge=1, le=4096)]
"""Processes, threads and machines: what a kernel and a scheduler can still hold."""
MAX_GROUPS: Final = 1 << 20
Groups = Annotated[int, Meta(ge=1, le=MAX_GROUPS)]
"""Groups or samples that are held at once: some bytes each in memory, and in one message."""
Calls = Annotated[int, Meta(ge=1, le=1 << 20)]
"""Calls of user code that are under way at once: a task each, and a connection each where they ask over a network."""
Mebibytes = Annotated[int, Meta(ge=1, le=1 << 22)]
"""MiB, up to 4 TiB: a map of it must fit the addresses of a process beside others."""
Seconds = Annotated[float, Meta(ge=0.001, le=7 * 24 * 3600)]
"""A time that somebody waits, from a millisecond (the clock's unit) to a week (``epoll`` counts to 24 days)."""
Seed = Annotated[int, Meta(ge=0, le=2**32 - 1)]
"""What every generator takes, numpy's in the user's own code too."""
Text = Annotated[str, Meta(pattern=r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]*\Z")]
"""Names, paths and addresses: no file has a NUL in its name, and a line break would end a line of logs and scripts."""


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every table of the file."""
