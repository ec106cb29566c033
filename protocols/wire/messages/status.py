"""The status of every kind of server: what people and programs may see of it.

Each kind of server replies with a struct of its own. ``as_dict`` gives the JSON of ``staleflow status --json``.
"""

from typing import Any

import msgspec

from staleflow.protocols.wire.messages.base import Message, Part
from staleflow.protocols.wire.messages.stages import StageFailing


class GetStatus(Message, frozen=True, kw_only=True):
    """Request the status of any server. -> SchedulerStatus, TrajectoriesStatus, ParametersStatus or RelayStatus"""


class Status(Message, frozen=True, kw_only=True):
    """Base of the replies to ``GetStatus``."""


def as_dict(status: msgspec.Struct) -> dict[str, Any]:
    """Return a status as plain data, by the names of its fields in JSON."""
    names = zip(status.__struct_encode_fields__, status.__struct_fields__, strict=True)
    return {key: _plain(getattr(status, name)) for key, name in names}


def _plain(value: Any) -> Any:
    match value:
        case msgspec.Struct():
            return as_dict(value)
        case list() | tuple():
            return [_plain(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
        case dict():
            return {key: _plain(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
        case _:
            return value


class WindowStatus(Part, frozen=True, kw_only=True):
    """Number of groups with one deadline, by state. Under the token bound there is one row, of deadline 0."""

    deadline: int
    leased: int = 0
    pushed: int = 0
    occupied: int = 0


class Pin(Part, frozen=True, kw_only=True):
    """A pinning group: the next step cannot be sealed without it."""

    group: int
    version: int
    worker: str
    """Name of the worker that generates the group; empty once it is pushed."""
    stages: tuple[str, ...] = ()
    """Stages that the pushed group waits for or is in, if known."""
    so_far_s: float | None = None
    """Seconds since its lease, or since its push."""
    left_s: float | None = None
    """Estimated seconds until it finishes."""
    lost_within_s: float | None = None
    """Seconds until the lease ends if its worker is silent; else None."""


class Pinned(Part, frozen=True, kw_only=True):
    """The groups that keep ``step`` from being sealed."""

    step: int = 0
    groups: tuple[Pin, ...] = ()
    """The first of them."""


class Ages(Part, frozen=True, kw_only=True):
    """(Versions behind the newest, number of groups), ascending. Under the token bound, live groups have no age."""

    in_flight: tuple[tuple[int, int], ...] = ()
    in_queue: tuple[tuple[int, int], ...] = ()
    consumed: tuple[tuple[int, int], ...] = ()
    """Versions behind the step that consumed the groups."""


class Hold(Part, frozen=True, kw_only=True):
    """Restriction of an instance that fails group after group."""

    groups: int
    """Failed groups in a row."""
    held_s: float = 0.0
    """Seconds until it may retry; 0 while it retries."""
    detail: str
    """Reason of the newest failure."""


class InstanceStatus(Part, frozen=True, kw_only=True):
    """One engine."""

    worker: str
    name: str = ""
    version: int = -1
    """Loaded version; -1 before the first."""
    running: int = 0
    """Number of samples being decoded."""
    waiting: int = 0
    """Number of samples queued in the engine, or on their way to it."""
    kv_used: float | None = None
    """Share of the KV cache in use, 0 to 1."""
    slots: int = 0
    """Number of samples that it decodes at once."""
    tokens_per_s: float = 0.0
    limit: str = ""
    """Sentence on the setting that limits its episodes; empty if none does."""
    held: int = 0
    """Number of groups leased to it."""
    failed: Hold | None = None
    """Restriction, if its groups fail."""
    loading: int | None = None
    """Version that it loads now."""
    evaluation: str = ""
    """Evaluation that it plays, ``SET at version VERSION``; empty if none."""
    last_command: str = ""
    last_seen_s: float = 0.0
    """Seconds since its last message."""


class WorkerStatus(Part, frozen=True, kw_only=True):
    """One attached process, or one that has become silent."""

    worker: str = ""
    name: str
    role: str
    alive: bool = True
    pid: int = 0
    last_seen_s: float = 0.0
    """Seconds since its last message."""


class StageStatus(Part, frozen=True, kw_only=True):
    """One stage of the run, over all shards."""

    stage: str
    after: tuple[str, ...] = ()
    """Stages that it waits for."""
    workers: int = 0
    waiting: int = 0
    """Number of groups that wait for a worker."""
    taken: int = 0
    """Number of groups that a worker has."""
    calls: int = 0
    """Maximum number of concurrent calls of user code in its workers; 0: unknown."""
    calls_under_way: int = 0
    limit: str = ""
    """Sentence on the setting that limits it; empty if none does."""
    failing: tuple[StageFailing, ...] = ()
    """Workers that fail every group."""


class ShardStatus(Part, frozen=True, kw_only=True):
    """Last report of one trajectory server."""

    shard: int
    used_share: float | None = None
    """Used share of its map, 0 to 1; None before the first report."""
    full: str = ""
    """Reason why it refuses pushes ("map", "disk", "read-only" or "failing"); empty while it accepts them."""


class Recommendation(Part, frozen=True, kw_only=True):
    """Recommended change of the run's engines, from measured shares of time."""

    action: str = ""
    """``add`` or ``remove`` engines, move a GPU ``to_training`` or ``to_rollout``, ``keep`` all; empty before enough
    steps were measured."""
    count: int = 0
    """Number of engines or GPUs."""
    sentence: str = ""
    """The change, its reason and its effect; the reason alone for ``keep``."""
    steps_per_min: float = 0.0
    """Measured steps a minute."""
    expected_steps_per_min: float = 0.0
    """Predicted steps a minute after the change."""


class RunTotals(msgspec.Struct, kw_only=True):
    """Counters since the start of the run, as the scheduler stores and updates them."""

    reserves: int = 0
    pushes: int = 0
    occupies: int = 0
    releases: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    drops: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    rejects: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    steps: int = 0
    tokens_trained: int = 0
    """Without masked tokens."""
    tokens_masked: int = 0
    tokens_pushed: int = 0
    tokens_generated: int = 0
    """As counted by the engines, including discarded tokens."""
    moves: int = 0
    """Groups that continued on another instance."""
    staleness: dict[int, int] = msgspec.field(default_factory=dict[int, int])
    """Groups trained, by their staleness."""
    samples_pushed: int = 0
    samples_trained: int = 0
    served_s: float = 0.0
    """Seconds that schedulers have served this run, up to the last commit."""
    violations: int = 0
    """Groups delivered beyond the staleness bound. Anything but 0 is a bug."""


class SchedulerStatus(Status, frozen=True, kw_only=True):
    """State of the run. The default is that of a scheduler that has not answered yet."""

    run: str = ""
    run_dir: str = ""
    """Run directory on the scheduler's machine."""
    parameters: str = ""
    """Address of the parameter server; empty before it attaches."""
    incarnation: int = 0
    """Number of starts of the scheduler in this run; 0: it has not answered yet."""
    uptime_s: float = 0.0
    """Seconds since this start."""
    run_s: float = 0.0
    """Seconds that schedulers have served this run; stands still once it is closed."""
    lineage: int = 0
    forks: tuple[tuple[int, int], ...] = ((0, 0),)
    """(lineage, its first own version) of the surviving history, both ascending: a version survives the rollbacks of
    all later lineages whose first version is above it."""
    version: int = -1
    """Newest published version; -1 before the first."""
    checkpoints: tuple[int, ...] = (0,)
    """Versions from which a trainer can resume, ascending."""
    next_step: int = 0
    """The next step to be sealed."""
    steps: int = 0
    """Number of steps of the run; 0: unknown."""
    trainer_term: int = 0
    """0 before a trainer has joined."""
    max_staleness: int = 0
    bound: str = ""
    on_overdue: str = ""
    batch_size: int = 1
    group_size: int = 1
    max_inflight: int = 0
    security: str = ""
    ledger: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Number of groups by state."""
    window: tuple[WindowStatus, ...] = ()
    """By deadline, ascending."""
    pinned: Pinned = Pinned()
    why: str = ""
    """Sentence on what the run waits for."""
    trainer_waits: str = ""
    """Cause of the trainer's wait (servers, workers, older groups, prompts, stages or engines); empty if it does not
    wait."""
    recommendation: Recommendation = Recommendation()
    wanted: tuple[str, ...] = ()
    """Names of the rollout workers that should run (``rollout.elastic``); empty: all that were started."""
    staleness: Ages = Ages()
    recent: tuple[dict[str, Any], ...] = ()
    """Noteworthy lines of the trace, newest last."""
    instances: tuple[InstanceStatus, ...] = ()
    workers: tuple[WorkerStatus, ...] = ()
    """Live processes, then those that became silent last."""
    workers_left_out: int = 0
    """Number of silent processes that ``workers`` lacks."""
    stages: tuple[StageStatus, ...] = ()
    """In the order of the configuration."""
    shards: tuple[ShardStatus, ...] = ()
    totals: RunTotals = msgspec.field(default_factory=RunTotals)
    lengths: dict[str, str | float] = msgspec.field(default_factory=dict[str, str | float])
    """Ranker, number of prompts that it has features of, and quality of the expected lengths as in the metrics."""
    violations: int = 0
    """Groups delivered beyond the staleness bound. Anything but 0 is a bug."""
    metrics: dict[str, float | int | None] = msgspec.field(default_factory=dict[str, float | int | None])
    """The last line of ``metrics.jsonl``."""
    first_metrics: dict[str, float | int | None] = msgspec.field(default_factory=dict[str, float | int | None])
    """Step, lineage and value of the first evaluation: the baseline for monitors that attach later."""
    finished: bool = False
    """The trainer has reported its end, and no evaluation remains."""
    trained: bool = False
    """The trainer has reported its end; evaluations may remain."""
    drained: str = ""
    """Reason of a drain; empty without one."""
    error: str = ""
    """Error with which the trainer ended."""
    closed: bool = False
    """The trace is closed."""
    full: str = ""
    """Exhausted resource of the scheduler ("map" or "disk"); empty while it has room."""
    map_used: float = 0.0
    """Used share of its LMDB map, 0 to 1."""

    @property
    def answered(self) -> bool:
        """False for the default, which stands for a scheduler that has not answered yet."""
        return self.incarnation > 0


class TrajectoriesStatus(Status, frozen=True, kw_only=True):
    """State of one trajectory server."""

    shard: int
    groups: dict[str, int]
    """Number of stored groups by phase."""
    used_share: float
    """Used share of its map, 0 to 1."""
    full: str
    """Reason why it refuses pushes; empty while it accepts them."""
    slabs: dict[str, int]
    """Number of files, of files that hold records, and of bytes in use; empty without slabs."""
    queues: dict[str, dict[str, int]]
    """Number of groups ``waiting`` and ``taken``, by stage."""
    unregistered: int
    """Number of reports that the scheduler has not acknowledged."""
    rows: int = 0
    """Number of prompts; the maximum number if clients submit them."""
    partials: int = 0
    """Number of groups whose samples are stored for a move."""


class StoredVersion(Part, frozen=True, kw_only=True):
    """One version that a relay stores."""

    lineage: int
    version: int
    sha: str
    nbytes: int
    pinned_by: tuple[str, ...]
    """Workers that use it."""


class PublishedVersion(StoredVersion, frozen=True, kw_only=True):
    """One version that the parameter server stores."""

    registered: bool
    """False while it is being published."""
    corrupt: str
    """Description of its damage; empty if it is whole."""


class RelayPlace(Part, frozen=True, kw_only=True):
    """Place of one relay in the tree."""

    relay: str
    """Its worker id."""
    endpoint: str
    parent: str = msgspec.field(name="from")
    """Worker id of the relay above; empty below the parameter server."""
    num_below: int
    """Number of readers at it."""


class ParametersStatus(Status, frozen=True, kw_only=True):
    """State of the parameter server. The default stands for one that has not answered yet."""

    versions: tuple[PublishedVersion, ...] = ()
    """Newest last."""
    uploads: int = 0
    """Number of uploads in progress."""
    relays: tuple[RelayPlace, ...] = ()
    mirror: str = ""
    """Why readers do not wait for the mirror; "" if it works, or if the run has none."""


class RelayStatus(Status, frozen=True, kw_only=True):
    """State of one relay."""

    versions: tuple[StoredVersion, ...] = ()
    """Newest last."""
    coming: int = 0
    """Number of versions that are arriving."""
    parent: str = msgspec.field(default="", name="from")
    """Address of the server above."""
