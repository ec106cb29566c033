"""To the scheduler: processes that join and leave the run."""

from staleflow.protocols.consistency.ids import LeaseId, Lineage, Version, WorkerId
from staleflow.protocols.wire.messages.base import Count, Message


class Attach(Message, frozen=True, kw_only=True):
    """Join the run as ``name``, which may be that of a silent process or one in the same ``slot``. -> AttachReply"""

    worker: WorkerId
    name: str
    role: str
    """rollout, stage, trainer, trajectories, parameters, relay, monitor or admin."""
    config_sha: str = ""
    """Of the configuration it runs with; empty when it takes the scheduler's."""
    endpoint: str = ""
    """Servers: where they are reached."""
    shard: int = 0
    """Trajectory servers: which."""
    rows: Count = 0
    """Trajectory servers: rows of the prompt source."""
    prompts_sha: str = ""
    """Trajectory servers: sha256 of the prompt source."""
    capacity: Count = 0
    """Rollout workers: groups that may be in flight at once."""
    pid: int = 0
    stage: str = ""
    """Stage workers: which stage; empty for the reward."""
    slot: str = ""
    """A secret of the supervisor that started it, the same for each process that it starts in this place: each may
    take the name at once. Empty without a supervisor."""


class AttachReply(Message, frozen=True, kw_only=True):
    run: str
    config: bytes
    """The run's configuration, JSON."""
    config_sha: str
    run_dir: str
    """As the scheduler sees it; the same path only on the same host."""
    shards: list[str]
    """Endpoints of the trajectory servers in order of shard; empty ones have not attached yet."""
    parameters: str
    """Endpoint of the parameter server; empty when it has not attached yet."""
    lineage: Lineage
    version: Version
    """Newest published; -1 before version 0."""
    lease_ms: int
    ending: bool = False
    """The run was drained or has finished: a worker that leaves now is not replaced."""
    leases: LeaseId = LeaseId(0)
    """Highest lease granted so far: a server that knows a higher one belongs to a newer ledger."""


class Detach(Message, frozen=True, kw_only=True):
    """A process leaves of its own will; its leases are released (aborted). -> Done"""

    worker: WorkerId
    why: str
