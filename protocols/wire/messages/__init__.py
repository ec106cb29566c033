"""All messages of the service, one struct each. A request and its reply are in the same module.

The docstring of a request names its reply (``-> Reply``). The reply to any request may also be ``Refusal``. Structs are
arrays on the wire (tag first), frozen, and reject unknown fields. All ``*_ms`` fields are durations: no clock reading
crosses the wire.
"""

from staleflow.protocols.wire.messages.attaching import Attach, AttachReply, Detach
from staleflow.protocols.wire.messages.base import (
    PROTOCOL,
    Count,
    Done,
    Drain,
    Message,
    Part,
    Ping,
    Pong,
    Refusal,
    TensorSpec,
)
from staleflow.protocols.wire.messages.evaluation import EndEvaluation, Evaluate, PromptScores, PutScores
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
    GetExpected,
    GetRetained,
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
)
from staleflow.protocols.wire.messages.parameters import (
    BeginPublish,
    BeginPublishReply,
    Chunk,
    CommitPublish,
    GetChunk,
    GetDelta,
    GetManifest,
    GetSources,
    JoinRelays,
    Manifest,
    ManifestReply,
    PublishChunk,
    Sources,
    TensorEntry,
    Unpin,
    WrittenSpan,
)
from staleflow.protocols.wire.messages.prompts import (
    SUBMITTED_ROWS,
    GetOutcomes,
    GetSubmittedRows,
    Outcome,
    Outcomes,
    RowResult,
    SubmitPrompts,
    SubmitPromptsReply,
    SubmittedRows,
)
from staleflow.protocols.wire.messages.stages import StageFailing, StageLoad, StageLoads
from staleflow.protocols.wire.messages.status import (
    GetStatus,
    ParametersStatus,
    RelayStatus,
    SchedulerStatus,
    Status,
    TrajectoriesStatus,
)
from staleflow.protocols.wire.messages.training import (
    Batch,
    CheckBatch,
    Claims,
    Finished,
    GetBatch,
    GetClaims,
    GetModelLimits,
    GetRetainedVersions,
    Join,
    JoinReply,
    MemberRef,
    Metrics,
    ModelLimits,
    NoMoreBatches,
    QuarantineGroups,
    RegisterCheckpoint,
    RegisterCheckpointReply,
    RegisterVersion,
    RegisterVersionReply,
    RetainedVersions,
)
from staleflow.protocols.wire.messages.trajectories import (
    FEATURES,
    GetGroups,
    GetRows,
    GetSlab,
    GetStageWork,
    GroupFrames,
    Groups,
    MadeColumn,
    PartialFrames,
    Place,
    PromptFeatures,
    PromptFeaturesReply,
    PushGroups,
    PushItem,
    PutPartial,
    PutStageResults,
    Rows,
    Slab,
    StageItem,
    StageResult,
    StageWork,
)

Request = (
    Ping
    | GetStatus
    | Drain
    | Attach
    | Detach
    | Report
    | Pulled
    | PutScores
    | Operations
    | GetRetained
    | GetExpected
    | StageLoads
    | GetModelLimits
    | PromptFeatures
    | SubmitPrompts
    | GetSubmittedRows
    | GetOutcomes
    | Join
    | GetBatch
    | CheckBatch
    | GetClaims
    | QuarantineGroups
    | RegisterVersion
    | RegisterCheckpoint
    | GetRetainedVersions
    | Metrics
    | Finished
    | GetRows
    | GetSlab
    | PushGroups
    | PutPartial
    | GetStageWork
    | PutStageResults
    | GetGroups
    | BeginPublish
    | PublishChunk
    | CommitPublish
    | GetManifest
    | GetChunk
    | GetDelta
    | JoinRelays
    | GetSources
    | Unpin
)

Reply = (
    Pong
    | Refusal
    | Done
    | SchedulerStatus
    | TrajectoriesStatus
    | ParametersStatus
    | RelayStatus
    | AttachReply
    | Commands
    | Results
    | Retained
    | Expected
    | PromptFeaturesReply
    | SubmitPromptsReply
    | SubmittedRows
    | Outcomes
    | JoinReply
    | ModelLimits
    | Batch
    | Claims
    | NoMoreBatches
    | RegisterVersionReply
    | RegisterCheckpointReply
    | RetainedVersions
    | Rows
    | Slab
    | StageWork
    | Groups
    | BeginPublishReply
    | ManifestReply
    | Sources
    | Chunk
)

__all__ = [
    "FEATURES",
    "PROTOCOL",
    "SUBMITTED_ROWS",
    "Abort",
    "Assign",
    "Attach",
    "AttachReply",
    "Batch",
    "BeginPublish",
    "BeginPublishReply",
    "CheckBatch",
    "Chunk",
    "Claims",
    "Command",
    "Commands",
    "CommitPublish",
    "Count",
    "Detach",
    "Done",
    "Drain",
    "EndEvaluation",
    "Evaluate",
    "Expected",
    "Finished",
    "GetBatch",
    "GetChunk",
    "GetClaims",
    "GetDelta",
    "GetExpected",
    "GetGroups",
    "GetManifest",
    "GetModelLimits",
    "GetOutcomes",
    "GetRetained",
    "GetRetainedVersions",
    "GetRows",
    "GetSlab",
    "GetSources",
    "GetStageWork",
    "GetStatus",
    "GetSubmittedRows",
    "GroupFrames",
    "Groups",
    "InstanceStats",
    "Interrupt",
    "Join",
    "JoinRelays",
    "JoinReply",
    "MadeColumn",
    "Manifest",
    "ManifestReply",
    "MemberRef",
    "Message",
    "Metrics",
    "ModelLimits",
    "NoMoreBatches",
    "Op",
    "Operations",
    "Outcome",
    "Outcomes",
    "ParametersStatus",
    "Part",
    "PartialFrames",
    "Ping",
    "Place",
    "Pong",
    "PromptFeatures",
    "PromptFeaturesReply",
    "PromptScores",
    "PublishChunk",
    "Pull",
    "Pulled",
    "PushGroups",
    "PushItem",
    "PutPartial",
    "PutScores",
    "PutStageResults",
    "QuarantineGroups",
    "Refusal",
    "RegisterCheckpoint",
    "RegisterCheckpointReply",
    "RegisterMissing",
    "RegisterOccupy",
    "RegisterPush",
    "RegisterQuarantine",
    "RegisterReject",
    "RegisterRelease",
    "RegisterVersion",
    "RegisterVersionReply",
    "RegisterYield",
    "RelayStatus",
    "Reply",
    "Report",
    "Request",
    "Result",
    "Results",
    "Retained",
    "RetainedVersions",
    "RowResult",
    "Rows",
    "SchedulerStatus",
    "Slab",
    "Sources",
    "StageFailing",
    "StageItem",
    "StageLoad",
    "StageLoads",
    "StageResult",
    "StageWork",
    "Status",
    "SubmitPrompts",
    "SubmitPromptsReply",
    "SubmittedRows",
    "TensorEntry",
    "TensorSpec",
    "TrajectoriesStatus",
    "Unpin",
    "WrittenSpan",
    "Yield",
]
