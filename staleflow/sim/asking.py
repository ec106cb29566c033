"""How everybody of a simulated run speaks to the scheduler, and what stands for weights."""

from collections.abc import Callable, Sequence
from typing import Protocol

from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.messages import Reply, Request


class Stalled(Exception):
    """Nothing can go on in a simulated run; the message says what it waits for."""


def nothing(_: Reply) -> None:
    """For an answer that changes nothing."""


class Ask(Protocol):
    """Sends a request; the answer comes to ``on_reply``, at this instant or later, or never."""

    def __call__(
        self, body: Request, on_reply: Callable[[Reply], None] = nothing, frames: Sequence[memoryview] = (), /
    ) -> None: ...


def sha_of(lineage: Lineage, version: Version) -> str:
    """What stands for the hash of a version's weights."""
    return f"{lineage:032x}{version:032x}"
