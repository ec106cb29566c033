"""Messages to the scheduler: the groups of a trajectory server by stage, and its fill level."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from staleflow.protocols.consistency.ids import GroupId, WorkerId
from staleflow.protocols.wire.messages.base import Count, Message, Part

MAX_NAMED_GROUPS = 256
"""Maximum number of groups of one stage that a report names."""

MAX_FAILING = 64
"""Maximum number of failing workers of one stage that a report names."""


class StageFailing(Part, frozen=True, kw_only=True):
    """A stage worker that has failed every group since its last success and is on hold."""

    worker: WorkerId
    failures: Count
    failing_ms: Count
    """Time since the first of these failures."""
    held_ms: Count
    """Time until the worker gets its next group."""
    why: Annotated[str, Meta(max_length=500)]


class StageLoad(Part, frozen=True, kw_only=True):
    """One stage of one trajectory server."""

    stage: str
    waiting: Count
    """Number of groups that wait for a worker."""
    taken: Count
    """Number of groups that a worker has."""
    groups: list[GroupId]
    """The oldest groups of both kinds; at most ``MAX_NAMED_GROUPS``."""
    calls: Count = 0
    """Maximum number of concurrent calls of user code in its workers; 0: unknown."""
    failing: list[StageFailing] = msgspec.field(default_factory=list[StageFailing])
    """Failing workers; at most ``MAX_FAILING``."""
    passed: Count = 0
    """Number of groups in other stages that have finished this one; counted only while a worker is failing."""


class StageLoads(Message, frozen=True, kw_only=True):
    """A shard reports the number of groups in each of its stages; the report replaces the previous one. -> Done"""

    shard: int
    loads: list[StageLoad]
    used_share: Annotated[float, Meta(ge=0, le=1)]
    """Share of the LMDB map in use."""
    full: Literal["", "map", "disk", "read-only", "failing"] = ""
    """Reason why the shard refuses pushes; "" while it accepts them."""
