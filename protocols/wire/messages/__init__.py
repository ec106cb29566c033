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
    Expected,
    Inventory,
    Op,
    Operations,
    RegisterMissing,
    RegisterOccupy,
    RegisterPush,
    RegisterQuarantine,
    RegisterReject,
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
    FindSources,
    GetChunk,
    GetDelta,
    GetManifest,
    JoinRelays,
    Manifest,
    ManifestOf,
    PublishChunk,
    PublishTo,
    Sources,
    TensorEntry,
    Unpin,
)
from staleflow.protocols.wire.messages.prompts import FEATURES, Describe, Described
from staleflow.protocols.wire.messages.stages import StageFailing, StageLoad, StageLoads
from staleflow.protocols.wire.messages.training import (
    Batch,
    CheckBatch,
    CheckpointRegistered,
    Claims,
    Finished,
    GetModelLimits,
    Join,
    Joined,
    KeepVersions,
    MemberRef,
    Metrics,
    ModelLimits,
    NextBatch,
    NextGroups,
    NoMoreBatches,
    QuarantineGroups,
    RegisterCheckpoint,
    Registered,
    RegisterVersion,
    VersionsInUse,
)
from staleflow.protocols.wire.messages.trajectories import (
    FetchGroups,
    FinishStage,
    GetRows,
    GetSlab,
    GroupFrames,
    Groups,
    MadeColumn,
    PartialFrames,
    Place,
    PushGroups,
    PushItem,
    PutPartial,
    Rows,
    Slab,
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
    | Inventory
    | StageLoads
    | GetModelLimits
    | Described
    | Join
    | NextBatch
    | CheckBatch
    | NextGroups
    | QuarantineGroups
    | RegisterVersion
    | RegisterCheckpoint
    | VersionsInUse
    | Metrics
    | Finished
    | GetRows
    | GetSlab
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
    | GetDelta
    | JoinRelays
    | FindSources
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
    | Expected
    | Describe
    | Joined
    | ModelLimits
    | Batch
    | Claims
    | NoMoreBatches
    | Registered
    | CheckpointRegistered
    | KeepVersions
    | Rows
    | Slab
    | StageWork
    | Groups
    | PublishTo
    | ManifestOf
    | Sources
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
    "CheckBatch",
    "CheckpointRegistered",
    "Chunk",
    "Claims",
    "Command",
    "Commands",
    "CommitPublish",
    "Count",
    "Describe",
    "Described",
    "Detach",
    "Done",
    "Drain",
    "Expected",
    "FetchGroups",
    "FindSources",
    "FinishStage",
    "Finished",
    "GetChunk",
    "GetDelta",
    "GetManifest",
    "GetModelLimits",
    "GetRows",
    "GetSlab",
    "GetStatus",
    "GroupFrames",
    "Groups",
    "InstanceStats",
    "Interrupt",
    "Inventory",
    "Join",
    "JoinRelays",
    "Joined",
    "KeepVersions",
    "MadeColumn",
    "Manifest",
    "ManifestOf",
    "MemberRef",
    "Message",
    "Metrics",
    "ModelLimits",
    "NextBatch",
    "NextGroups",
    "NoMoreBatches",
    "Op",
    "Operations",
    "Part",
    "PartialFrames",
    "Ping",
    "Place",
    "Pong",
    "PublishChunk",
    "PublishTo",
    "Pull",
    "Pulled",
    "PushGroups",
    "PushItem",
    "PutPartial",
    "QuarantineGroups",
    "Refusal",
    "RegisterCheckpoint",
    "RegisterMissing",
    "RegisterOccupy",
    "RegisterPush",
    "RegisterQuarantine",
    "RegisterReject",
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
    "Slab",
    "Sources",
    "StageFailing",
    "StageItem",
    "StageLoad",
    "StageLoads",
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
