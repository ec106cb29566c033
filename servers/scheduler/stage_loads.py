"""What the trajectory servers last said of themselves: how many groups each stage has, which, and how full they are."""

from collections.abc import Iterable
from dataclasses import dataclass

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.wire.messages import Done, StageLoad, StageLoads
from staleflow.protocols.wire.messages.stages import NAMED
from staleflow.runtime.endpoint import Call
from staleflow.servers.scheduler.answers import Answers


@dataclass(frozen=True, slots=True)
class Load:
    """One stage of the run."""

    waiting: int
    taken: int


class Loads:
    """The newest report of each shard. Nothing of it is stored."""

    def __init__(self, shards: int, stages: Iterable[str], answers: Answers) -> None:
        self._stages = set(stages)
        self._answers = answers
        self._shards: list[list[StageLoad]] = [[] for _ in range(shards)]
        self.used_shares: list[float | None] = [None] * shards
        """Of the map of each shard; None: it has not said yet."""
        self.full: list[str] = [""] * shards
        """What has no room there, the map or the disk, so that it refuses pushes."""

    def report(self, call: Call, body: StageLoads) -> None:
        """One shard's."""
        if not 0 <= body.shard < len(self._shards) or any(len(load.groups) > NAMED for load in body.loads):
            self._answers.refuse(call, Code.MALFORMED, f"shard {body.shard} is none, or names more than {NAMED} groups")
            return
        if unknown := {load.stage for load in body.loads} - self._stages:
            self._answers.refuse(call, Code.MALFORMED, f"there is no stage {min(unknown)!r}")
            return
        self._shards[body.shard] = body.loads
        self.used_shares[body.shard], self.full[body.shard] = body.used_share, body.full
        self._answers.hold(call, Done())

    def by_stage(self) -> dict[str, Load]:
        """Of all shards together; stages without a group are left out."""
        found: dict[str, Load] = {}
        for load in (load for loads in self._shards for load in loads):
            before = found.get(load.stage, Load(0, 0))
            found[load.stage] = Load(before.waiting + load.waiting, before.taken + load.taken)
        return found

    def of_group(self, group: GroupId) -> list[str]:
        """The stages that this group waits for or is in, as far as reports name it."""
        return [load.stage for loads in self._shards for load in loads if group in load.groups]
