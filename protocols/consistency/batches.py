"""A sealed batch: which groups, in which order, and the digest that proves it is the same when it is sealed again."""

from collections.abc import Sequence
from hashlib import sha256

from staleflow.protocols.consistency.effects import Member, Sealed
from staleflow.protocols.consistency.groups import Group


class Batch:
    """The batch of one step, sealed or consumed, with its groups in order."""

    __slots__ = ("consumed", "groups", "sealed")

    def __init__(self, sealed: Sealed, groups: tuple[Group, ...], consumed: bool = False) -> None:
        self.sealed = sealed
        self.groups = groups
        self.consumed = consumed


def digest(members: Sequence[Member]) -> str:
    """Hex sha256 over one line a member, in order."""
    lines = (f"{m.group} {m.lease} {m.lineage} {m.version} {m.sha}\n" for m in members)
    return sha256("".join(lines).encode()).hexdigest()
