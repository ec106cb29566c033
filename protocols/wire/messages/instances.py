"""Messages to the scheduler: reports of rollout instances, and the commands in reply."""

from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Version, WorkerId
from staleflow.protocols.wire.messages.base import Count, Message, Part, Sha
from staleflow.protocols.wire.messages.evaluation import EndEvaluation, Evaluate


class InstanceStats(Part, frozen=True, kw_only=True):
    """Statistics of an engine."""

    lineage: Lineage = Lineage(0)
    version: Version = Version(-1)
    """Loaded version; -1 before the first."""
    running: Count = 0
    """Number of samples being decoded."""
    waiting: Count = 0
    """Number of samples queued in the engine, or on their way to it."""
    kv_used: float = 0.0
    """Share of the KV cache in use, 0 to 1."""
    kv_tokens: Count = 0
    """Number of tokens in the KV cache."""
    kv_capacity: Count = 0
    """Capacity of the KV cache in tokens; 0: unknown."""
    slots: Count = 0
    """Number of samples that the engine decodes at once; 0: unknown."""
    tokens_per_s: float = 0.0
    """Average over the last few seconds."""
    generated_tokens: Count = 0
    """Number of tokens since the process started."""
    steps: Count = 0
    """Number of decode steps since the process started; each writes one token of every running sample."""
    busy_s: float = 0.0
    """Seconds with at least one running sample, since the process started."""
    paused_s: float = 0.0
    """Seconds in which decoding stood still to load weights, since the process started; 0: unknown."""
    episodes: Count = 0
    """Number of environment episodes in progress."""
    episodes_waiting: Count = 0
    """Number of episodes that wait because no environment process may play one more."""
    evaluated_tokens: Count = 0
    """Part of ``generated_tokens`` that belongs to finished samples of evaluations."""


class Report(Message, frozen=True, kw_only=True):
    """A rollout instance reports its state, acknowledges commands, and waits for more. -> Commands

    The scheduler delays the reply until it has a command, at most ``wait_ms``. A newer report of the same worker makes
    it reply to the older one at once. A report renews every lease of the worker.
    """

    worker: WorkerId
    ack: Count
    """Number of the last command that was carried out or accepted; 0 at first."""
    held: list[LeaseId]
    """Leases that the worker works on. The scheduler reassigns missing ones and aborts those it should not have."""
    stats: InstanceStats
    wait_ms: int = 1000
    evaluation: Count = 0
    """Ticket of the evaluation that the worker plays; 0: none."""
    leaving: bool = False
    """The worker leaves soon and hands its groups over: it gets no more of them."""


class Assign(Message, frozen=True, kw_only=True):
    """Command: produce this group."""

    group: GroupId
    lease: LeaseId
    lineage: Lineage
    version: Version
    shard: int
    """Trajectory server that has the prompt row and receives the payload."""
    partial: LeaseId = LeaseId(0)
    """Lease under which that server keeps the partial samples of another instance, to continue from; 0: none."""
    partial_sha: Sha = ""
    """Digest of the partial samples from that instance's ``RegisterYield``; the bytes from the shard must match it."""


class Pull(Message, frozen=True, kw_only=True):
    """Command: load these weights."""

    lineage: Lineage
    version: Version


class Interrupt(Message, frozen=True, kw_only=True):
    """Command: finish this lease with the tokens so far and push them, marked truncated."""

    lease: LeaseId


class Abort(Message, frozen=True, kw_only=True):
    """Command: discard the tokens of this lease, which has already ended."""

    lease: LeaseId


class Yield(Message, frozen=True, kw_only=True):
    """Command: stop, send the tokens of this lease to the shard (``PutPartial``), then send ``RegisterYield``.

    The worker keeps the lease until the reply. A group that is finished by then is pushed as usual.
    """

    lease: LeaseId


Command = Assign | Pull | Interrupt | Abort | Yield | Evaluate | EndEvaluation


class Commands(Message, frozen=True, kw_only=True):
    """Commands numbered ``first, first + 1, ...``; repeated until a report acknowledges them."""

    first: int
    commands: list[Command]
    version: Version
    """Newest published version."""
    drain: bool = False
    """Finish the current groups and stop; no more will be assigned."""


class Pulled(Message, frozen=True, kw_only=True):
    """A worker has loaded a version, or failed to load it. -> Done"""

    worker: WorkerId
    lineage: Lineage
    version: Version
    sha: Sha
    ok: bool
