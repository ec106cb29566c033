"""What a strategy may know, and what it may order. Plain frozen values, so that the same strategy runs in a simulator.

A snapshot counts what was already ordered as done (``held``, ``pulling``): a strategy never acts twice on one fact.
"""

from collections.abc import Mapping

import msgspec

from staleflow.protocols.consistency.ids import Lineage, Version, WorkerId


class Instance(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One rollout worker as the scheduler last heard of it."""

    worker: WorkerId
    lineage: Lineage
    version: Version
    """Loaded weights; -1 before any."""
    usable: bool
    """The loaded weights belong to the surviving lineage: new groups may start with them."""
    behind: bool
    """The newest published weights are others."""
    pulling: bool
    """It was told to load newer weights, and may still do so."""
    stuck: bool = False
    """It was told, and could not or did not: it may go on with the weights it has."""
    held: int
    """Groups that it works on, those ordered included."""
    capacity: int
    """Groups that may be in flight at once."""
    running: int = 0
    """Samples being decoded."""
    waiting: int = 0
    """Samples queued in its engine."""
    kv_used: float = 0.0
    tokens_per_s: float = 0.0

    @property
    def free(self) -> int:
        """Groups that it could start now."""
        return max(self.capacity - self.held, 0)


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The state of the run, as far as it matters to who does what next."""

    lineage: Lineage
    """That published ``version``."""
    version: Version
    """Newest published; -1 before any."""
    instances: tuple[Instance, ...]
    """In order of attachment; those that left are not here."""
    room: Mapping[Version, int]
    """Leases that the ledger would admit now at a version, for each version that a usable instance has loaded."""
    prompts: int
    """Groups that could be dealt now, or a large number."""
    last_served: WorkerId | None = None
    """Who got the last group."""


class Start(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Order: begin ``num_groups`` new groups at an instance, with the weights it has."""

    worker: WorkerId
    version: Version
    num_groups: int


class Load(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Order: an instance is to load the newest weights."""

    worker: WorkerId
    lineage: Lineage
    version: Version


Order = Start | Load
