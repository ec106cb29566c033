"""To the scheduler: what rollout instances report, and the commands that answer them."""

from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Version, WorkerId
from staleflow.protocols.wire.messages.base import Count, Message, Part, Sha


class InstanceStats(Part, frozen=True, kw_only=True):
    """What an engine says of itself."""

    lineage: Lineage = Lineage(0)
    version: Version = Version(-1)
    """Loaded weights; -1 before any."""
    running: Count = 0
    """Samples being decoded."""
    waiting: Count = 0
    """Samples queued in the engine, or on their way there."""
    kv_used: float = 0.0
    """Share of the KV cache in use, 0 to 1."""
    kv_tokens: Count = 0
    """Tokens in the KV cache."""
    kv_capacity: Count = 0
    """Tokens that the KV cache holds; 0: the engine cannot say."""
    slots: Count = 0
    """Samples that the engine decodes at once; 0: it cannot say."""
    tokens_per_s: float = 0.0
    """Over the last few seconds."""
    generated_tokens: Count = 0
    """Since the process started."""
    steps: Count = 0
    """Decode steps since the process started: each wrote a token of every running sample."""
    busy_s: float = 0.0
    """Seconds with at least one running sample, since the process started."""
    episodes: Count = 0
    """Episodes of the environment under way."""
    episodes_waiting: Count = 0
    """Episodes that wait for a process of the environment: no process may play one more."""


class Report(Message, frozen=True, kw_only=True):
    """A rollout instance tells how it is, acknowledges commands, and waits for more. -> Commands

    The server keeps it until there is a command, at most ``wait_ms``; a newer report of the same worker answers the
    older one with what there is. Renews every lease of the worker.
    """

    worker: WorkerId
    ack: Count
    """Number of the last command carried out or taken over; 0 at first."""
    held: list[LeaseId]
    """Leases that the worker works on. One it lacks is assigned again; one it should not have is aborted."""
    stats: InstanceStats
    wait_ms: int = 1000


class Assign(Message, frozen=True, kw_only=True):
    """Command: produce this group."""

    group: GroupId
    lease: LeaseId
    lineage: Lineage
    version: Version
    shard: int
    """Trajectory server that has the prompt row and takes the payload."""
    partial: LeaseId = LeaseId(0)
    """Lease under which that server keeps what another instance wrote of it, to go on from; 0: none."""
    partial_sha: Sha = ""
    """Of what that instance wrote, by its own ``RegisterYield``: what the shard gives must have it."""


class Pull(Message, frozen=True, kw_only=True):
    """Command: load these weights."""

    lineage: Lineage
    version: Version


class Interrupt(Message, frozen=True, kw_only=True):
    """Command: finish this lease with the tokens so far and push them, marked truncated."""

    lease: LeaseId


class Abort(Message, frozen=True, kw_only=True):
    """Command: throw this lease's tokens away; the lease is already gone."""

    lease: LeaseId


class Yield(Message, frozen=True, kw_only=True):
    """Command: stop and keep this lease's tokens; give them to the shard (``PutPartial``), then say ``RegisterYield``.

    The lease stays held until that is answered. A group that is done by then is pushed as if nothing had been said.
    """

    lease: LeaseId


Command = Assign | Pull | Interrupt | Abort | Yield


class Commands(Message, frozen=True, kw_only=True):
    """Commands numbered ``first, first + 1, ...``; repeated until a report acknowledges them."""

    first: int
    commands: list[Command]
    version: Version
    """Newest published."""
    drain: bool = False
    """Finish what you hold; nothing more will come."""


class Pulled(Message, frozen=True, kw_only=True):
    """A worker loaded, or failed to load, a version. -> Done"""

    worker: WorkerId
    lineage: Lineage
    version: Version
    sha: Sha
    ok: bool
