"""A stage whose model belongs to the history of the run works only once it follows the lineage of its groups."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from staleflow.clients.stage.history import RunHistory, newest
from staleflow.clients.stage.model_stage import FollowingStage, Stopping
from staleflow.clients.stage.worker import StageGroup, StageOutcome
from staleflow.protocols.wire.messages import SchedulerStatus
from tests.clients.stage.judged import group

FIRST = RunHistory()
LATER = RunHistory.of(SchedulerStatus(forks=((0, 0), (1, 5)), checkpoints=(2, 4)))


class Model:
    """Records its calls."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def follow(self, history: RunHistory) -> None:
        self.calls.append(history)

    def judge(self, groups: Sequence[StageGroup], stopping: Stopping) -> list[StageOutcome]:
        self.calls.append("judge")
        return [{"values": np.zeros(one.payload.num_tokens, np.float32)} for one in groups]

    def accepted(self, groups: Sequence[StageGroup], stopping: Stopping) -> None:
        self.calls.append("accepted")

    def close(self) -> None:
        self.calls.append("close")


@asynccontextmanager
async def stage(model: Model) -> AsyncGenerator[FollowingStage]:
    made = FollowingStage(lambda: model)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def test_no_group_is_valued_or_learned_before_the_rollback_behind_it() -> None:
    model = Model()
    async with stage(model) as following:
        ahead = [group(1, lineage=1, version=5)]
        made, learned = asyncio.create_task(following.make(ahead)), asyncio.create_task(following.accepted(ahead))
        await following.follow(FIRST)
        await asyncio.sleep(0)
        await following.make([group(2, version=9)])
        await following.follow(LATER)
        await made
        await learned
    assert model.calls == [FIRST, "judge", LATER, "judge", "accepted", "close"]


async def test_a_history_that_has_not_changed_is_not_adopted_again() -> None:
    model = Model()
    async with stage(model) as following:
        await following.follow(LATER)
        await following.follow(RunHistory.of(SchedulerStatus(forks=((0, 0), (1, 5)), checkpoints=(2, 4))))
    assert model.calls == [LATER, "close"]


@pytest.mark.parametrize(
    ("lineage", "version", "survives"),
    [(0, 4, True), (0, 5, False), (1, 5, True), (1, 99, True), (2, 5, False)],
)
def test_a_group_survives_if_no_rollback_abandoned_a_version_of_its_tokens(
    lineage: int, version: int, *, survives: bool
) -> None:
    made = group(1)
    made.payload.segments[1, 1:3] = lineage, version
    assert LATER.keeps(made.payload) is survives
    assert newest(made.payload) == (lineage, version)
    assert newest(group(1, lengths=(0,)).payload) == (0, 0)
