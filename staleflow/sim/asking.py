"""Requests of a simulated run's processes to the scheduler, and the stand-in for weights."""

from collections.abc import Callable, Sequence
from typing import Protocol

from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.messages import Reply, Request


class Stalled(Exception):
    """A simulated run cannot make progress; the message states what it waits for."""


def nothing(_: Reply) -> None:
    """Ignore a reply."""


class Ask(Protocol):
    """Sends a request; ``on_reply`` receives the reply, at this instant, later, or never."""

    def __call__(
        self, body: Request, on_reply: Callable[[Reply], None] = nothing, frames: Sequence[memoryview] = (), /
    ) -> None: ...


def sha_of(lineage: Lineage, version: Version) -> str:
    """Return the stand-in for the hash of a version's weights."""
    return f"{lineage:032x}{version:032x}"
