"""To the scheduler: where the groups of a trajectory server are among its stages, and how full it is."""

from typing import Annotated, Literal

from msgspec import Meta

from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.wire.messages.base import Count, Message, Part

NAMED = 256
"""Most groups of one stage that a report names."""


class StageLoad(Part, frozen=True, kw_only=True):
    """One stage of one trajectory server."""

    stage: str
    waiting: Count
    """Groups that no worker has taken."""
    taken: Count
    """Groups that a worker has."""
    groups: list[GroupId]
    """Of both, those that came first; at most ``NAMED``."""


class StageLoads(Message, frozen=True, kw_only=True):
    """A shard says how many groups each of its stages has; it takes the place of what it said before. -> Done"""

    shard: int
    loads: list[StageLoad]
    used_share: Annotated[float, Meta(ge=0, le=1)]
    """Of its map."""
    full: Literal["", "map", "disk", "read-only", "failing"] = ""
    """For want of room here it refuses pushes."""
