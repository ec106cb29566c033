"""What the trajectory servers last said of themselves: how many groups each stage has, which, and how full they are."""

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
from staleflow.servers.scheduler.ledger.pending_replies import Answers


@dataclass(frozen=True, slots=True)
class Load:
    """One stage of the run."""

    waiting: int
    taken: int
    calls: int = 0
    """Most calls of user code that its workers have under way at once; 0: unknown."""


def calls_under_way(config: Config, stage: str, load: Load) -> int:
    """Calls of user code, as far as the groups in work tell."""
    return min(load.taken * calls_a_group(config, stage), load.calls)


def calls_limit(config: Config, stage: str, load: Load, workers: int) -> str:
    """Say that a stage has all the calls under way that it may have, and which key raises that; empty while it has
    fewer, or nothing is queued."""
    section, busy = section_of(config, stage), calls_under_way(config, stage, load)
    queued = load.waiting + max(0, load.taken - math.ceil(load.calls / calls_a_group(config, stage)))
    if not load.calls or busy < load.calls or not queued:
        return ""
    one_by_one = load.calls <= workers
    key = f"{section}.workers, or make it an async def" if one_by_one else f"{section}.concurrency or {section}.workers"
    groups = f"{queued} group{'s' if queued != 1 else ''}"
    return f"stage {stage}: {busy} of {load.calls} calls under way, {groups} queued; raise {key}"


def episodes_limit(config: Config, name: str, stats: InstanceStats) -> str:
    """Say that episodes at the instance ``name`` wait for a process of the environment while its engine has free slots,
    and which key lets more of them play; empty while none waits, or the engine itself is full."""
    slots, environment = stats.slots or config.rollout.max_inflight, config.environment
    if not stats.episodes_waiting or stats.waiting or stats.running >= slots:
        return ""
    places = environment.processes * environment.concurrency
    found = f"environment at {name}: {stats.episodes} of {places} episodes under way, {stats.episodes_waiting} queued"
    if stats.episodes < places:  # crashes: the pool has lowered its limit
        return f"{found}; fewer share a process while episodes end it, see the log of {name}"
    return f"{found}; raise environment.concurrency or environment.processes"


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
        if not 0 <= body.shard < len(self._shards) or any(
            len(load.groups) > MAX_NAMED_GROUPS or len(load.failing) > MAX_FAILING for load in body.loads
        ):
            most = f"{MAX_NAMED_GROUPS} groups or {MAX_FAILING} failing workers"
            self._answers.refuse(call, Code.MALFORMED, f"shard {body.shard} is none, or names more than {most}")
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
            calls = max(before.calls, load.calls)  # every worker serves all shards
            found[load.stage] = Load(before.waiting + load.waiting, before.taken + load.taken, calls)
        return found

    def failing(self) -> dict[str, list[StageFailing]]:
        """By stage: the workers that fail every group, each with the report that knows it for longest."""
        found: dict[str, dict[str, StageFailing]] = {}
        for load in (load for loads in self._shards for load in loads):
            workers = found.setdefault(load.stage, {})
            for one in load.failing:
                if one.worker not in workers or workers[one.worker].failing_ms < one.failing_ms:
                    workers[one.worker] = one
        return {stage: list(workers.values()) for stage, workers in found.items() if workers}

    def all_fail(self, served: Mapping[str, int], for_ms: int) -> tuple[str, StageFailing] | None:
        """A stage whose workers, as many as serve it, have all failed everything for so long, with one of them. A stage
        that groups under way have passed is none: they may still be trained."""
        passed = {load.stage for loads in self._shards for load in loads if load.passed}
        for stage, failing in self.failing().items():
            late = [one for one in failing if one.failing_ms >= for_ms]
            if late and len(late) >= served[stage] and stage not in passed:
                return stage, max(late, key=lambda one: one.failures)
        return None

    def of_group(self, group: GroupId) -> list[str]:
        """The stages that this group waits for or is in, as far as reports name it."""
        return [load.stage for loads in self._shards for load in loads if group in load.groups]
