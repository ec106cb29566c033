"""What a strategy may know, and what it may order. Plain frozen values, so that the same strategy runs in a simulator.

A snapshot counts what was already ordered as done (``held``, ``pulling``): a strategy never acts twice on one fact.
"""

from collections.abc import Mapping

import msgspec

from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Step, Version, WorkerId


class Cost(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How fast an instance decodes: StaleFlow's cost model (2601.12784), seconds of one step and tokens a second.

    One step decodes a token for each of n running samples, which together have kv tokens in the cache.
    """

    k1: float
    """Seconds a token of KV cache costs each step."""
    k2: float
    """Least seconds of a step's computation."""
    k3: float
    """Seconds a running sample costs each step, once they are so many that this is more than ``k2``."""
    k4: float
    """Seconds of overhead a step."""

    def step_s(self, running: float, kv: float) -> float:
        """Seconds of one step."""
        return self.k1 * kv + max(self.k2, self.k3 * running) + self.k4

    def rate(self, running: float, kv: float) -> float:
        """T(n, kv): tokens a second, all samples together."""
        seconds = self.step_s(running, kv)
        return running / seconds if seconds > 0 else 0.0


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
    on_hold: bool = False
    """It fails group after group, and starts nothing for now."""
    held: int
    """Groups that it works on, those ordered included."""
    coming: int = 0
    """Of these: groups that go on here once they have left where they are."""
    ordered: int = 0
    """Of these: groups that it was told to begin and has not acknowledged, so that its numbers do not show them."""
    capacity: int
    """Groups that may be in flight at once."""
    running: int = 0
    """Samples being decoded."""
    waiting: int = 0
    """Samples queued in its engine."""
    slots: int = 0
    """Samples that it decodes at once; 0: unknown."""
    kv_used: float = 0.0
    kv_tokens: int = 0
    """Tokens in its KV cache."""
    kv_capacity: int = 0
    """Tokens that its KV cache holds; 0: unknown."""
    tokens_per_s: float = 0.0
    cost: Cost | None = None
    """Fitted to its own reports; None before there are enough."""

    @property
    def free(self) -> int:
        """Groups that it could start now."""
        return max(self.capacity - self.held, 0)


class Next(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A group that could be started."""

    group: GroupId
    length: float = 0.0
    """Expected tokens of one sample; 0.0: unknown."""
    home: WorkerId | None = None
    """Who was given this group, or this prompt in an earlier epoch, the last time; kept for sticky routing only."""


class Flight(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A leased group."""

    group: GroupId
    lease: LeaseId
    worker: WorkerId
    version: Version
    deadline: Step | None
    """Last step that may consume it; None under the token bound."""
    spare: bool = False
    age_ms: int = 0
    """Since its lease was granted."""
    length: float = 0.0
    """Expected tokens of one sample; 0.0: unknown."""
    written: float = 0.0
    """Expected tokens of one sample that it had when it moved to where it is; 0.0: it began there."""


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
    next: tuple[Next, ...]
    """Groups to deal next, in the order of the composition: the first n of them are what n starts must take."""
    last_served: WorkerId | None = None
    """Who got the last group."""
    group_size: int
    """Samples that are started a group."""
    batch_size: int
    """Groups a step."""
    max_staleness: int
    leased: int = 0
    """Groups being generated, spares among them."""
    spares: int = 0
    """Of all live groups: those beyond what the bound counts."""
    pushed: int = 0
    """Groups in stages."""
    occupied: int = 0
    """Groups that could be trained and are in no batch yet."""
    sealed: int = 0
    """Groups in batches that are not consumed."""
    training: int = 0
    """Of these: groups of the batch that is being trained."""
    token_bound: bool = False
    """Groups have no deadline; tokens that are too old are masked."""
    lead: float = 0.0
    """Batches of groups that ``just_in_time`` keeps live; see ``admission.Pace``."""
    waits: bool = False
    """The trainer waits for a batch."""
    pinning: tuple[Flight, ...] = ()
    """While the trainer waits: the leased groups that keep its step from being sealed."""
    flights: tuple[Flight, ...] = ()
    """Every leased group; empty unless the migration strategy asks for them."""
    now_ms: int = 0


class Start(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Order: begin new groups at an instance, in this order, with the weights it has."""

    worker: WorkerId
    version: Version
    groups: tuple[GroupId, ...]


class Load(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Order: an instance is to load the newest weights."""

    worker: WorkerId
    lineage: Lineage
    version: Version


class Move(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Order: a group goes on at another instance, with what it has so far."""

    group: GroupId
    lease: LeaseId
    worker: WorkerId
    """Where it is."""
    to: WorkerId
    written: float = 0.0
    """Tokens that one sample is expected to have by now."""


Order = Start | Load | Move
