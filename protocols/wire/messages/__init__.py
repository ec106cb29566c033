"""Every message of the service, one struct each. Requests and their replies stand together.

A request names its reply in its docstring. Any request may be answered by ``Refusal``. Structs are arrays on the wire
(tag first), frozen, and refuse unknown fields. All ``*_ms`` are durations; no clock reading crosses the wire.
"""

from staleflow.protocols.wire.messages.attaching import Attach, Attached, Detach
from staleflow.protocols.wire.messages.base import (
    PROTOCOL,
    Count,
    Done,
    Drain,
    GetStatus,
    Message,
    Part,
    Ping,
    Pong,
    Refusal,
    Status,
    TensorSpec,
)
from staleflow.protocols.wire.messages.instances import (
    Abort,
    Assign,
    Command,
    Commands,
    InstanceStats,
    Interrupt,
    Pull,
    Pulled,
    Report,
    Yield,
)
from staleflow.protocols.wire.messages.operations import (
    Op,
    Operations,
    RegisterOccupy,
    RegisterPush,
    RegisterQuarantine,
    RegisterRelease,
    RegisterYield,
    Result,
    Results,
    Retained,
    Retention,
)
from staleflow.protocols.wire.messages.parameters import (
    BeginPublish,
    Chunk,
    CommitPublish,
    GetChunk,
    GetManifest,
    Manifest,
    ManifestOf,
    PublishChunk,
    PublishTo,
    TensorEntry,
    Unpin,
)
from staleflow.protocols.wire.messages.prompts import FEATURES, Describe, Described
from staleflow.protocols.wire.messages.training import (
    Batch,
    Finished,
    Join,
    Joined,
    KeepVersions,
    MemberRef,
    Metrics,
    NextBatch,
    RegisterCheckpoint,
    Registered,
    RegisterVersion,
    VersionsInUse,
)
from staleflow.protocols.wire.messages.trajectories import (
    FetchGroups,
    FinishStage,
    GetRows,
    GroupFrames,
    Groups,
    PartialFrames,
    PushGroups,
    PushItem,
    PutPartial,
    Rows,
    StageItem,
    StageResult,
    StageWork,
    TakeStage,
)

Request = (
    Ping
    | GetStatus
    | Drain
    | Attach
    | Detach
    | Report
    | Pulled
    | Operations
    | Retention
    | Described
    | Join
    | NextBatch
    | RegisterVersion
    | RegisterCheckpoint
    | VersionsInUse
    | Metrics
    | Finished
    | GetRows
    | PushGroups
    | PutPartial
    | TakeStage
    | FinishStage
    | FetchGroups
    | BeginPublish
    | PublishChunk
    | CommitPublish
    | GetManifest
    | GetChunk
    | Unpin
)

Reply = (
    Pong
    | Refusal
    | Done
    | Status
    | Attached
    | Commands
    | Results
    | Retained
    | Describe
    | Joined
    | Batch
    | Registered
    | KeepVersions
    | Rows
    | StageWork
    | Groups
    | PublishTo
    | ManifestOf
    | Chunk
)

__all__ = [
    "FEATURES",
    "PROTOCOL",
    "Abort",
    "Assign",
    "Attach",
    "Attached",
    "Batch",
    "BeginPublish",
    "Chunk",
    "Command",
    "Commands",
    "CommitPublish",
    "Count",
    "Describe",
    "Described",
    "Detach",
    "Done",
    "Drain",
    "FetchGroups",
    "FinishStage",
    "Finished",
    "GetChunk",
    "GetManifest",
    "GetRows",
    "GetStatus",
    "GroupFrames",
    "Groups",
    "InstanceStats",
    "Interrupt",
    "Join",
    "Joined",
    "KeepVersions",
    "Manifest",
    "ManifestOf",
    "MemberRef",
    "Message",
    "Metrics",
    "NextBatch",
    "Op",
    "Operations",
    "Part",
    "PartialFrames",
    "Ping",
    "Pong",
    "PublishChunk",
    "PublishTo",
    "Pull",
    "Pulled",
    "PushGroups",
    "PushItem",
    "PutPartial",
    "Refusal",
    "RegisterCheckpoint",
    "RegisterOccupy",
    "RegisterPush",
    "RegisterQuarantine",
    "RegisterRelease",
    "RegisterVersion",
    "RegisterYield",
    "Registered",
    "Reply",
    "Report",
    "Request",
    "Result",
    "Results",
    "Retained",
    "Retention",
    "Rows",
    "StageItem",
    "StageResult",
    "StageWork",
    "Status",
    "TakeStage",
    "TensorEntry",
    "TensorSpec",
    "Unpin",
    "VersionsInUse",
    "Yield",
]
