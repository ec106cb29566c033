"""Messages to the scheduler: processes that join and leave the run."""

from msgspec import field

from staleflow.protocols.consistency.ids import LeaseId, Lineage, Version, WorkerId
from staleflow.protocols.wire.messages.base import Count, Message


class Attach(Message, frozen=True, kw_only=True):
    """Join the run as ``name``. The name of a silent process, or of one in the same ``slot``, may be reused.

    -> AttachReply
    """

    worker: WorkerId
    name: str
    role: str
    """rollout, stage, trainer, trajectories, parameters, relay, prompts, monitor or admin."""
    config_sha: str = ""
    """Hash of the shared settings in the process's configuration; empty if it takes the scheduler's."""
    endpoint: str = ""
    """Servers: address at which they are reached."""
    shard: int = 0
    """Trajectory servers: number of the shard."""
    rows: Count = 0
    """Trajectory servers: number of rows of the prompt source."""
    prompts_sha: str = ""
    """Trajectory servers: sha256 of the prompt source."""
    capacity: Count = 0
    """Rollout workers: maximum number of groups in flight."""
    pid: int = 0
    stage: str = ""
    """Stage workers: name of the stage; empty for the reward."""
    slot: str = ""
    """A secret of the supervisor, the same for each process that it starts in this place, so that a replacement may
    take the name at once. Empty without a supervisor."""
    eval_prompts: list[Count] = field(default_factory=list[int])
    """Rollout workers: number of prompts of each evaluation set of the configuration, in order. Empty: the worker plays
    none."""


class AttachReply(Message, frozen=True, kw_only=True):
    run: str
    config: bytes
    """Configuration of the run, as JSON."""
    config_sha: str
    run_dir: str
    """Run directory on the scheduler's host; valid only on the same host."""
    shards: list[str]
    """Endpoints of the trajectory servers in order of shard; "" for one that has not attached yet."""
    parameters: str
    """Endpoint of the parameter server; "" if it has not attached yet."""
    lineage: Lineage
    version: Version
    """Newest published version; -1 before version 0."""
    lease_ms: int
    ending: bool = False
    """The run was drained or has finished; a worker that leaves now is not replaced."""
    leases: LeaseId = LeaseId(0)
    """Highest lease granted so far. A server that stores a higher one belongs to a newer ledger."""
    wanted: tuple[str, ...] = ()
    """Names of the rollout workers that should run (``rollout.elastic``); empty: all that were started."""


class Detach(Message, frozen=True, kw_only=True):
    """A process leaves voluntarily; its leases are released (aborted). -> Done"""

    worker: WorkerId
    why: str
