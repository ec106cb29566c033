"""A sealed batch: its groups in order, and the digest that proves that a resealed batch is the same."""

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
        """Number of leading groups that are already retired because no rollback can need the batch any more."""

    def left(self) -> tuple[Group, ...]:
        """Return the groups that are not retired."""
        return self.groups[self.forgotten :]


def digest(members: Sequence[Member]) -> str:
    """Return the hex sha256 over one line a member, in order."""
    lines = [f"{group} {lease} {lineage} {version} {sha}\n" for group, lease, lineage, version, sha, *_ in members]
    return sha256("".join(lines).encode()).hexdigest()
