"""Inputs and outputs of the strategies: plain frozen values, so that the same strategy runs in a simulator.

A snapshot counts orders as already carried out (``held``, ``pulling``), so a strategy never acts twice on one fact.
"""

from collections.abc import Mapping

import msgspec

from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Step, Version, WorkerId


class Cost(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Decoding speed of an instance: StaleFlow's cost model (2601.12784).

    One step decodes one token for each of n running samples, which together have kv tokens in the cache.
    """

    k1: float
    """Seconds a step for each token in the KV cache."""
    k2: float
    """Minimum seconds of a step's computation."""
    k3: float
    """Seconds a step for each running sample, where their sum exceeds ``k2``."""
    k4: float
    """Seconds of overhead a step."""

    def step_s(self, running: float, kv: float) -> float:
        """Return the seconds of one step."""
        return self.k1 * kv + max(self.k2, self.k3 * running) + self.k4

    def rate(self, running: float, kv: float) -> float:
        """Return T(n, kv): the tokens a second of all samples together."""
        seconds = self.step_s(running, kv)
        return running / seconds if seconds > 0 else 0.0


class Instance(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One rollout worker, as of its last report."""

    worker: WorkerId
    lineage: Lineage
    version: Version
    """Loaded version; -1 before the first."""
    usable: bool
    """The loaded weights belong to the surviving lineage, so new groups may start with them."""
    behind: bool
    """The loaded weights are not the newest published ones."""
    pulling: bool
    """An order to load newer weights was sent, and the instance may still carry it out."""
    stuck: bool = False
    """The load failed or timed out; the instance may continue with the weights it has."""
    on_hold: bool = False
    """The instance fails one group after another and starts nothing for now."""
    held: int
    """Number of groups that it works on, including ordered ones."""
    coming: int = 0
    """Number of these groups that will continue here once they have left another instance."""
    ordered: int = 0
    """Number of these groups whose start is not acknowledged yet, so that the reports do not include them."""
    capacity: int
    """Maximum number of groups in flight."""
    running: int = 0
    """Number of samples being decoded."""
    waiting: int = 0
    """Number of samples queued in the engine."""
    slots: int = 0
    """Number of samples decoded at once; 0: unknown."""
    kv_used: float = 0.0
    """Share of the KV cache in use, 0 to 1."""
    kv_tokens: int = 0
    """Number of tokens in the KV cache."""
    kv_capacity: int = 0
    """Capacity of the KV cache in tokens; 0: unknown."""
    tokens_per_s: float = 0.0
    cost: Cost | None = None
    """Cost fitted to the instance's own reports; None before there are enough of them."""

    @property
    def free(self) -> int:
        """Number of groups that the instance could start now."""
        return max(self.capacity - self.held, 0)


class Next(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A group that could be started."""

    group: GroupId
    length: float = 0.0
    """Expected tokens of one sample; 0.0: unknown."""
    home: WorkerId | None = None
    """Worker that last got this group, or this prompt in an earlier epoch; kept for sticky routing only."""


class Flight(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A leased group."""

    group: GroupId
    lease: LeaseId
    worker: WorkerId
    version: Version
    deadline: Step | None
    """Last step that may consume the group; None under the token bound."""
    spare: bool = False
    age_ms: int = 0
    """Milliseconds since the lease was granted."""
    length: float = 0.0
    """Expected tokens of one sample; 0.0: unknown."""
    written: float = 0.0
    """Expected tokens of one sample at the time the group moved to this worker; 0.0: it started here."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The state of the run, as far as the strategies need it."""

    lineage: Lineage
    """Lineage that published ``version``."""
    version: Version
    """Newest published version; -1 before the first."""
    instances: tuple[Instance, ...]
    """Attached instances, in order of attachment."""
    room: Mapping[Version, int]
    """Number of leases that the ledger would admit now, by version, for each version a usable instance has loaded."""
    next: tuple[Next, ...]
    """Groups to start next, in the order of the composition. n starts must take the first n of them."""
    last_served: WorkerId | None = None
    """Instance that got the last group."""
    group_size: int
    """Number of samples that are started for each group."""
    batch_size: int
    """Number of groups a step."""
    max_staleness: int
    leased: int = 0
    """Number of groups being generated, including spares."""
    spares: int = 0
    """Number of live groups in addition to those that the bound counts."""
    pushed: int = 0
    """Number of groups in stages."""
    occupied: int = 0
    """Number of groups that could be trained and are in no batch yet."""
    sealed: int = 0
    """Number of groups in batches that are not consumed."""
    training: int = 0
    """Number of these groups whose batch is being trained."""
    token_bound: bool = False
    """Groups have no deadline; tokens that are too old are masked."""
    lead: float = 0.0
    """Number of batches that ``just_in_time`` keeps live; see ``admission.Pace``."""
    waits: bool = False
    """The trainer waits for a batch."""
    pinning: tuple[Flight, ...] = ()
    """Leased groups that keep the next step from being sealed; filled only while the trainer waits."""
    flights: tuple[Flight, ...] = ()
    """Every leased group; empty unless the migration strategy needs them."""
    now_ms: int = 0


class Start(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Order: start new groups at an instance, in this order, with the weights it has."""

    worker: WorkerId
    version: Version
    groups: tuple[GroupId, ...]


class Load(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Order: load the newest weights at an instance."""

    worker: WorkerId
    lineage: Lineage
    version: Version


class Move(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Order: continue a group at another instance, with the tokens it has."""

    group: GroupId
    lease: LeaseId
    worker: WorkerId
    """Instance that has the group."""
    to: WorkerId
    written: float = 0.0
    """Expected tokens of one sample at this time."""


Order = Start | Load | Move
