"""Last reports of the trajectory servers: the groups of each stage, and the used space of each server."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from staleflow.configs.schema import Config
from staleflow.configs.stages import calls_a_group, section_of
from staleflow.net.endpoint import Call
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.wire.messages import Done, InstanceStats, StageFailing, StageLoad, StageLoads
from staleflow.protocols.wire.messages.stages import MAX_FAILING, MAX_NAMED_GROUPS
from staleflow.protocols.wire.messages.status import ShardStatus
from staleflow.servers.scheduler.ledger.pending_replies import PendingReplies


@dataclass(frozen=True, slots=True)
class Load:
    """Load of one stage, over all shards."""

    waiting: int
    taken: int
    calls: int = 0
    """Maximum number of concurrent calls of user code in its workers; 0: unknown."""


def calls_under_way(config: Config, stage: str, load: Load) -> int:
    """Estimate the running calls of user code from the groups in work."""
    return min(load.taken * calls_a_group(config, stage), load.calls)


def calls_limit(config: Config, stage: str, load: Load, workers: int) -> str:
    """Explain that a stage is at its limit of concurrent calls, and name the key that raises it.

    Empty if it is below the limit or has no queued groups.
    """
    section, busy = section_of(config, stage), calls_under_way(config, stage, load)
    queued = load.waiting + max(0, load.taken - math.ceil(load.calls / calls_a_group(config, stage)))
    if not load.calls or busy < load.calls or not queued:
        return ""
    one_by_one = load.calls <= workers
    key = f"{section}.workers, or make it an async def" if one_by_one else f"{section}.concurrency or {section}.workers"
    groups = f"{queued} group{'s' if queued != 1 else ''}"
    return f"stage {stage}: {busy} of {load.calls} calls under way, {groups} queued; raise {key}"


def episodes_limit(config: Config, name: str, stats: InstanceStats) -> str:
    """Explain that episodes on an instance wait for environment processes while its engine has free slots.

    The sentence names the key that allows more episodes. Empty if none waits or the engine itself is full.
    """
    slots, environment = stats.slots or config.rollout.max_inflight, config.environment
    if not stats.episodes_waiting or stats.waiting or stats.running >= slots:
        return ""
    places = environment.processes * environment.concurrency
    result = f"environment at {name}: {stats.episodes} of {places} episodes under way, {stats.episodes_waiting} queued"
    if stats.episodes < places:  # the pool lowers its limit after crashes
        return f"{result}; fewer episodes share a process because episodes crash it, see the log of {name}"
    return f"{result}; raise environment.concurrency or environment.processes"


class StageLoadTable:
    """The newest report of each shard. Kept in memory only."""

    def __init__(self, shards: int, stages: Iterable[str], replies: PendingReplies) -> None:
        self._stages = set(stages)
        self._replies = replies
        self._shards: list[list[StageLoad]] = [[] for _ in range(shards)]
        self.shards = [ShardStatus(shard=shard) for shard in range(shards)]

    def report(self, call: Call, body: StageLoads) -> None:
        """Store the report of one shard."""
        if not 0 <= body.shard < len(self._shards) or any(
            len(load.groups) > MAX_NAMED_GROUPS or len(load.failing) > MAX_FAILING for load in body.loads
        ):
            most = f"{MAX_NAMED_GROUPS} groups or {MAX_FAILING} failing workers"
            self._replies.refuse(call, Code.MALFORMED, f"shard {body.shard} does not exist, or names more than {most}")
            return
        if unknown := {load.stage for load in body.loads} - self._stages:
            self._replies.refuse(call, Code.MALFORMED, f"stage {min(unknown)!r} does not exist")
            return
        self._shards[body.shard] = body.loads
        self.shards[body.shard] = ShardStatus(shard=body.shard, used_share=body.used_share, full=body.full)
        self._replies.add(call, Done())

    def by_stage(self) -> dict[str, Load]:
        """Return the load of each stage over all shards; stages without groups are omitted."""
        result: dict[str, Load] = {}
        for load in (load for loads in self._shards for load in loads):
            before = result.get(load.stage, Load(0, 0))
            calls = max(before.calls, load.calls)  # every worker serves all shards
            result[load.stage] = Load(before.waiting + load.waiting, before.taken + load.taken, calls)
        return result

    def failing(self) -> dict[str, list[StageFailing]]:
        """Return by stage the workers that fail every group, each with the report of the longest failure."""
        result: dict[str, dict[str, StageFailing]] = {}
        for load in (load for loads in self._shards for load in loads):
            workers = result.setdefault(load.stage, {})
            for one in load.failing:
                if one.worker not in workers or workers[one.worker].failing_ms < one.failing_ms:
                    workers[one.worker] = one
        return {stage: list(workers.values()) for stage, workers in result.items() if workers}

    def all_fail(self, served: Mapping[str, int], for_ms: int) -> tuple[str, StageFailing] | None:
        """Return a stage whose workers have all failed every group for ``for_ms``, with one of them; None if none has.

        ``served``: workers by stage. A stage that groups in flight have passed is skipped: they may still be trained.
        """
        passed = {load.stage for loads in self._shards for load in loads if load.passed}
        for stage, failing in self.failing().items():
            late = [one for one in failing if one.failing_ms >= for_ms]
            if late and len(late) >= served[stage] and stage not in passed:
                return stage, max(late, key=lambda one: one.failures)
        return None

    def of_group(self, group: GroupId) -> list[str]:
        """Return the stages that this group waits for or is in, if the reports name it."""
        return [load.stage for loads in self._shards for load in loads if group in load.groups]
