"""A sealed batch: which groups, in which order, and the digest that proves it is the same when it is sealed again."""

from collections.abc import Sequence
from hashlib import sha256

from staleflow.protocols.consistency.effects import Member, Sealed
from staleflow.protocols.consistency.groups import Group


class Batch:
    """The batch of one step, sealed or consumed, with its groups in order."""

    __slots__ = ("consumed", "forgotten", "groups", "sealed")

    def __init__(self, sealed: Sealed, groups: tuple[Group, ...], consumed: bool = False) -> None:
        self.sealed = sealed
        self.groups = groups
        self.consumed = consumed
        self.forgotten = 0
        """Groups at its beginning that are retired already: no rollback can need the batch any more."""

    def left(self) -> tuple[Group, ...]:
        """Its groups that are not retired."""
        return self.groups[self.forgotten :]


def digest(members: Sequence[Member]) -> str:
    """Hex sha256 over one line a member, in order."""
    lines = [f"{group} {lease} {lineage} {version} {sha}\n" for group, lease, lineage, version, sha, *_ in members]
    return sha256("".join(lines).encode()).hexdigest()
