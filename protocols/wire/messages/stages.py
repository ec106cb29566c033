"""To the scheduler: where the groups of a trajectory server are among its stages, and how full it is."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from staleflow.protocols.consistency.ids import GroupId, WorkerId
from staleflow.protocols.wire.messages.base import Count, Message, Part

NAMED = 256
"""Most groups of one stage that a report names."""


MAX_FAILING = 64
"""Failing workers of one stage that a report names."""


class StageFailing(Part, frozen=True, kw_only=True):
    """A stage worker that has failed every group since its last success, and is held."""

    worker: WorkerId
    failures: Count
    failing_ms: Count
    """Since the first of these."""
    held_ms: Count
    """Until it gets its next group."""
    why: Annotated[str, Meta(max_length=500)]


class StageLoad(Part, frozen=True, kw_only=True):
    """One stage of one trajectory server."""

    stage: str
    waiting: Count
    """Groups that no worker has taken."""
    taken: Count
    """Groups that a worker has."""
    groups: list[GroupId]
    """Of both, those that came first; at most ``NAMED``."""
    calls: Count = 0
    """Most calls of user code that its workers have under way at once; 0: unknown."""
    failing: list[StageFailing] = msgspec.field(default_factory=list[StageFailing])
    """At most ``MAX_FAILING``."""
    passed: Count = 0
    """Groups on their way through other stages that are done with this one; counted while a worker is failing only."""


class StageLoads(Message, frozen=True, kw_only=True):
    """A shard says how many groups each of its stages has; it takes the place of what it said before. -> Done"""

    shard: int
    loads: list[StageLoad]
    used_share: Annotated[float, Meta(ge=0, le=1)]
    """Of its map."""
    full: Literal["", "map", "disk", "read-only", "failing"] = ""
    """For want of room here it refuses pushes."""
