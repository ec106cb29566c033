"""A small request never causes an unbounded reply."""

from typing import Any

import pytest

from staleflow.net.client import worker_id
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.wire.messages import GetGroups, GetRows, Groups, Rows
from staleflow.servers.trajectories.service import MAX_ROWS
from tests.servers.running import Run


@pytest.mark.parametrize("count", [MAX_ROWS + 1, 200_000])
async def test_rows_of_very_many_groups_are_refused(run: Run, count: int) -> None:
    groups = [GroupId(0)] * count
    asks: list[tuple[Any, type]] = [
        (GetRows(groups=groups), Rows),
        (GetGroups(groups=groups, shas=[""] * count), Groups),
    ]
    for ask, answer in asks:
        with pytest.raises(Refused) as no:
            await run.shard(worker_id("rollout")).ask(ask, answer)
        assert no.value.code is Code.OVERSIZE
    assert len((await run.shard(worker_id("rollout")).ask(GetRows(groups=groups[:9]), Rows)).rows) == 9


async def test_one_group_is_fetched_once_in_an_answer(run: Run) -> None:
    with pytest.raises(Refused) as no:
        await run.shard(worker_id("trainer")).ask(GetGroups(groups=[GroupId(0)] * 2, shas=["", ""]), Groups)
    assert no.value.code is Code.OVERSIZE
