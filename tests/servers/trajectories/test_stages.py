"""A shard keeps its groups safe while stage workers come, reply, fail and vanish."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import zmq

from staleflow.clients.stage.worker import StageGroup, StageOutcome
from staleflow.clients.stage.worker import StageWorker as ShippedStageWorker
from staleflow.net.client import worker_id
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.codec import encode_request
from staleflow.protocols.wire.messages import (
    Attach,
    AttachReply,
    GetStageWork,
    GetStatus,
    PutStageResults,
    Results,
    StageItem,
    StageResult,
    StageWork,
    Status,
)
from staleflow.protocols.wire.payload_digest import payload_digest
from staleflow.protocols.wire.tensors import Array, pack, specs_and_frames
from staleflow.servers.trajectories import main as trajectories
from staleflow.servers.trajectories import stage_calls, stage_reports
from staleflow.servers.trajectories.records import Key, Record
from staleflow.servers.trajectories.stage_queue import HOLD_AFTER
from staleflow.servers.trajectories.store import unpack_verified
from tests.net.conftest import RawPeer
from tests.servers.running import GIVE_UP_S, WEIGHTS, Rollout, Run, StageWorker, eventually, payload


async def pushed(run: Run, count: int = 2) -> Rollout:
    """Push ``count`` groups, which then wait for the stage."""
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    rollout = await run.rollout()
    await rollout.push(*(await rollout.leases(count))[:count])
    return rollout


async def released(run: Run, why: str) -> int:
    number: int = (await run.status(run.where.scheduler))["totals"]["releases"].get(why, 0)
    return number


async def test_a_worker_that_waits_gets_the_group_when_it_comes(run: Run) -> None:
    stage = StageWorker(run)
    taking = asyncio.create_task(stage.take(wait_ms=20_000))
    await pushed(run)
    items, _ = await taking
    assert items


async def test_a_worker_that_waits_in_vain_is_answered_with_nothing(run: Run) -> None:
    assert await StageWorker(run).take(wait_ms=50) == ([], [])


async def test_groups_of_a_worker_that_vanishes_go_to_another_and_its_late_answer_is_refused(run: Run) -> None:
    await pushed(run)
    first, second = StageWorker(run, "reward-0"), StageWorker(run, "reward-1")
    items, _ = await first.take()
    first.client.close()
    again, _ = await second.take(wait_ms=20_000)
    assert [item.group for item in again] == [item.group for item in items]
    late = StageWorker(run, "reward-2")
    assert {r.code for r in await late.finish(items)} == {Code.STALE_LEASE}
    assert {r.code for r in await second.finish(again)} == {None}


async def test_a_result_that_is_sent_again_is_answered_the_same(run: Run) -> None:
    await pushed(run)
    stage = StageWorker(run)
    items, _ = await stage.take()
    assert {r.code for r in await stage.finish(items)} == {None}
    assert {r.code for r in await stage.finish(items)} == {None}


async def test_a_take_whose_answer_was_lost_gets_the_same_groups_again(run: Run) -> None:
    await pushed(run)
    peer = RawPeer(zmq.DEALER)
    peer.zmq.set(zmq.ROUTING_ID, b"reward-0.1/0")
    peer.zmq.connect(run.where.trajectories[0])

    async def take(id: int) -> list[tuple[int, int]]:
        ask = GetStageWork(stage="reward", worker=WorkerId("reward-0.1"), max_groups=1, wait_ms=0)
        found, reply = await peer.ask(encode_request(id, ask))
        assert found == id
        assert isinstance(reply, StageWork)
        return [(item.group, item.ticket) for item in reply.items]

    first = await take(8)
    assert (len(first), await take(8)) == (1, first)
    assert await take(7) == []  # an echo of a request that was answered long ago takes nothing
    second = await take(9)  # a worker that requests more has not received the groups it did not finish
    assert [group for group, _ in second] == [group for group, _ in first]
    assert second != first
    assert (await take(8), await take(9)) == ([], second)
    peer.zmq.close()


async def test_an_answer_has_no_more_bytes_than_are_asked_for_but_for_its_first_group(run: Run) -> None:
    rollout = await pushed(run, count=4)
    stage, size = StageWorker(run), len(pack(payload(0).to_arrays()))
    taken = list[StageItem]()
    for most_bytes, groups in ((1, 1), (2 * size, 2), (4 * size - 1, 3), (4 * size, 4)):
        ask = GetStageWork(stage="reward", worker=stage.worker, max_groups=4, most_bytes=most_bytes)
        work, frames = await stage.client.call(ask)
        assert isinstance(work, StageWork)
        assert (len(work.items), len(frames)) == (groups, groups)
        taken = work.items
    await rollout.push(*(await rollout.leases(1))[:1])
    rest, _ = await stage.take(held=taken)  # groups that did not fit into a reply were waiting again
    assert {r.code for r in await stage.finish([*taken, *rest])} == {None}


async def test_a_newer_question_of_a_worker_ends_the_one_before(run: Run) -> None:
    """The worker has given up the older request, so no one would read groups sent in reply to it."""
    stage = StageWorker(run)
    older = asyncio.create_task(stage.take(wait_ms=20_000))
    await stage.client.ask(GetStatus(), Status)  # arrives behind the request
    newer = asyncio.create_task(stage.take(wait_ms=20_000))
    async with asyncio.timeout(GIVE_UP_S):
        assert await older == ([], [])
        await pushed(run)
        items, _ = await newer
    assert items


async def test_an_answer_says_how_long_there_was_nothing(run: Run) -> None:
    stage = StageWorker(run)
    work, _ = await stage.client.call(GetStageWork(stage="reward", worker=stage.worker, max_groups=1, wait_ms=100))
    assert isinstance(work, StageWork)
    assert 90 <= work.waited_ms < 60_000
    await pushed(run)
    work, _ = await stage.client.call(GetStageWork(stage="reward", worker=stage.worker, max_groups=1))
    assert isinstance(work, StageWork)
    assert (len(work.items), work.waited_ms) == (1, 0)


@pytest.mark.parametrize("checks", [True, False])
async def test_payload_is_looked_at_by_its_worker_or_else_by_the_shard(
    run: Run, monkeypatch: pytest.MonkeyPatch, checks: bool
) -> None:
    looked = list[int]()

    def spied(key: Key, record: Record, blob: bytes) -> dict[str, Array]:
        looked.append(key.group)
        return unpack_verified(key, record, blob)

    monkeypatch.setattr(stage_calls, "unpack_verified", spied)
    await pushed(run)
    stage = StageWorker(run)
    work, frames = await stage.client.call(
        GetStageWork(stage="reward", worker=stage.worker, max_groups=1, checks=checks)
    )
    assert isinstance(work, StageWork)
    assert [payload_digest((frame,)) for frame in frames] == [item.sha for item in work.items]
    assert len(frames) == 1
    assert looked == ([] if checks else [work.items[0].group])


async def test_a_worker_that_asks_for_more_keeps_what_it_names_and_loses_what_it_does_not(run: Run) -> None:
    await pushed(run, count=4)
    stage = StageWorker(run)
    (slow, lost), _ = await stage.take(most=2)
    more, _ = await stage.take(most=1, held=[slow])
    assert [item.group for item in more] == [lost.group]  # first in the queue again, under a new ticket
    assert {r.code for r in await stage.finish([lost])} == {Code.STALE_LEASE}
    rest, _ = await stage.take(held=[slow, *more])
    assert len({item.group for item in [slow, *more, *rest]}) == 4
    assert {r.code for r in await stage.finish([slow, *more, *rest])} == {None}


class Slow:
    """Reward every group at once except the first."""

    together: ClassVar[bool] = False

    def __init__(self) -> None:
        self.stuck: list[int] = []

    async def make(self, groups: Sequence[StageGroup]) -> Sequence[StageOutcome]:
        if not self.stuck:
            self.stuck += [group.group for group in groups]
            await asyncio.Event().wait()
        return [{"reward": np.asarray([0.0, 1.0], np.float32)}] * len(groups)

    async def accepted(self, groups: Sequence[StageGroup]) -> None: ...


async def test_a_batch_is_there_though_a_group_of_the_only_worker_takes_for_ever(run: Run) -> None:
    await pushed(run, count=4)
    me, slow = worker_id("reward-0"), Slow()
    shipped = ShippedStageWorker(worker=me, name="reward", stage=slow, max_groups=2)
    working = asyncio.create_task(shipped.serve([run.shard(me)]))
    trainer = await run.trainer()
    async with asyncio.timeout(20):
        batch = await trainer.next_batch(0)
    assert len(batch.members) == 2
    assert not {member.group for member in batch.members} & set(slow.stuck)
    working.cancel()


async def test_of_two_that_wait_the_one_with_fewer_groups_is_served_first(run: Run) -> None:
    rollout = await pushed(run, count=1)
    busy, idle = StageWorker(run, "reward-0"), StageWorker(run, "reward-1")
    items, _ = await busy.take()
    first = asyncio.create_task(busy.take(held=items))
    await busy.client.ask(GetStatus(), Status)  # arrives behind its request
    second = asyncio.create_task(idle.take())
    await idle.client.ask(GetStatus(), Status)
    await rollout.push(*(await rollout.leases(1))[:1])
    await asyncio.wait((first, second), return_when=asyncio.FIRST_COMPLETED)
    assert (second.done(), first.done()) == (True, False)
    first.cancel()
    await asyncio.wait((first,))


async def test_an_echo_of_a_worker_that_was_gone_for_a_while_takes_nothing(run: Run) -> None:
    """A stopped worker resends its call when it resumes, reads the reply right after, and ignores the second reply."""
    await pushed(run)
    peer = RawPeer(zmq.DEALER)
    peer.zmq.set(zmq.ROUTING_ID, b"reward-0.1/0")
    peer.zmq.connect(run.where.trajectories[0])
    ask = encode_request(5, GetStageWork(stage="reward", worker=WorkerId("reward-0.1"), max_groups=8, wait_ms=0))
    _, reply = await peer.ask(ask)
    assert isinstance(reply, StageWork)
    assert reply.items

    async def taken() -> int:
        count: int = (await run.status(run.where.trajectories[0]))["queues"]["reward"]["taken"]
        return count

    async def lost() -> bool:
        return not await taken()

    await eventually(lost)
    assert await peer.ask(ask) == (5, StageWork(items=[]))
    assert await taken() == 0
    again, _ = await StageWorker(run, "reward-1").take()
    assert [item.group for item in again] == [item.group for item in reply.items]
    peer.zmq.close()


async def test_equal_rewards_are_filtered_and_the_payload_goes(run: Run) -> None:
    await pushed(run)
    stage = StageWorker(run)
    items, _ = await stage.take()
    await stage.finish(items, rewards=(0.5, 0.5))

    async def all_gone() -> bool:
        held = (await run.status(run.where.trajectories[0]))["groups"]
        return not held and await released(run, "filtered") == len(items)

    assert await eventually(all_gone)


@pytest.mark.parametrize(
    "section", [{"rollout": {"filter": "none"}}, {"trainer": {"algorithm": {"advantage": "reinforce_pp"}}}]
)
async def test_without_a_filter_equal_rewards_are_occupied(
    make_run: Callable[..., Run], section: dict[str, dict[str, Any]]
) -> None:
    """Either no filter was chosen, or the advantage is relative to the batch and needs none."""
    run = make_run(**section)
    run.scheduler()
    run.trajectories()
    run.parameters()
    await pushed(run)
    stage = StageWorker(run)
    items, _ = await stage.take()
    await stage.finish(items, rewards=(0.5, 0.5))

    async def occupied() -> bool:
        counts = (await run.status(run.where.scheduler))["totals"]
        return bool(counts["occupies"] == len(items))

    assert await eventually(occupied)


async def test_a_group_that_every_worker_fails_is_released(run: Run) -> None:
    await pushed(run, count=1)
    for name in ("reward-0", "reward-1"):
        assert await released(run, "aborted") == 0
        stage = StageWorker(run, name)
        items, _ = await stage.take()
        assert [r.code for r in await stage.fail(items[0], "reward raised ValueError")] == [None]

    async def aborted() -> bool:
        return await released(run, "aborted") == 1

    assert await eventually(aborted)


async def test_no_group_is_lost_to_a_worker_that_fails_everything_at_once(run: Run) -> None:
    """If its judge is unreachable, for example, the failing worker is always free sooner than the other one."""
    rollout = await pushed(run, count=4)
    stages, failed, done = [StageWorker(run, name) for name in ("broken-0", "good-0")], 0, set[int]()
    broken, good = stages

    async def fails() -> None:
        nonlocal failed
        while True:
            items, _ = await broken.take(wait_ms=100)
            for item in items:
                failed += 1
                await broken.fail(item, "judge: connection refused")

    failing = asyncio.create_task(fails())
    async with asyncio.timeout(20):
        while len(done) < 4:
            items, _ = await good.take(most=1, wait_ms=500)
            done |= {item.group for item in items if [r.code for r in await good.finish([item])] == [None]}
    assert await released(run, "aborted") == 0
    await rollout.push(*(await rollout.leases(1))[:1])
    again, _ = await good.take()
    assert again
    failing.cancel()


async def test_a_worker_that_fails_everything_is_named_with_its_reason(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stage_reports, "INTERVAL_S", 0.05)
    await pushed(run, count=4)
    broken = StageWorker(run, "broken-0")
    client = run.client(run.where.scheduler, broken.worker)
    await client.ask(Attach(worker=broken.worker, name="broken-0", role="stage", stage="reward"), AttachReply)
    items, _ = await broken.take()
    for item in items[:HOLD_AFTER]:
        await broken.fail(item, "judge: connection refused")

    async def named() -> bool:
        status = await run.status(run.where.scheduler)
        (reward,) = status["stages"]
        why = f"; broken-0 fails every group of the stage reward, {HOLD_AFTER} in a row, and is held: judge: connection"
        return why in status["why"] and [one["failures"] for one in reward["failing"]] == [HOLD_AFTER]

    assert await eventually(named)

    async def logged() -> bool:
        told = f"stage worker {broken.worker} held after failing {HOLD_AFTER} groups of stage reward in a row"
        return any(message.startswith(told) for message in caplog.messages)

    assert await eventually(logged)


async def test_a_pause_of_the_shard_ends_no_ticket(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard reads the worker's results after the clock has passed the end of its tickets."""
    monkeypatch.setattr(trajectories, "STAGE_SLACK_S", 1.0)
    run = make_run(reward={"timeout_s": 0.1, "retries": 0})
    run.scheduler()
    run.trajectories()
    run.parameters()
    await pushed(run)
    stage = StageWorker(run)
    items, _ = await stage.take()
    await asyncio.sleep(0.1)
    time.sleep(4.0)  # noqa: ASYNC251 - the pause: each of the two tickets lasts for 2.4 seconds
    await asyncio.sleep(0.3)  # the shard checks its tickets before it reads new messages
    assert {r.code for r in await stage.finish(items)} == {None}


async def test_a_ticket_that_is_late_without_a_pause_ends(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectories, "STAGE_SLACK_S", 0.3)
    run = make_run(reward={"timeout_s": 0.1, "retries": 0})
    run.scheduler()
    run.trajectories()
    run.parameters()
    await pushed(run)
    stage, other = StageWorker(run), StageWorker(run, "reward-1")
    items, _ = await stage.take()
    again, _ = await other.take(wait_ms=20_000)
    assert [item.group for item in again] == [item.group for item in items]
    assert {r.code for r in await stage.finish(items)} == {Code.STALE_LEASE}


@pytest.mark.parametrize(
    ("column", "values", "says"),
    [
        ("reward", np.asarray([0.0, np.nan], np.float32), "not finite"),
        ("reward", np.asarray([0.0], np.float32), "must be float32"),
        ("reward", np.asarray([0.0, 1.0], np.float16), "must be float32"),
        ("length", np.asarray([0.0, 1.0], np.float32), "must make stage/reward/reward"),
    ],
)
async def test_columns_that_are_none_release_the_group(run: Run, column: str, values: np.ndarray, says: str) -> None:
    await pushed(run, count=1)
    for name in ("reward-0", "reward-1"):  # a second worker tries the group before it is given up
        stage = StageWorker(run, name)
        items, _ = await stage.take()
        specs, frames = specs_and_frames({column: values})
        result = StageResult(group=items[0].group, lease=items[0].lease, ticket=items[0].ticket, frames=specs)
        finish = PutStageResults(stage="reward", worker=stage.worker, results=[result])
        answer = (await stage.client.ask(finish, Results, frames)).results
        assert [r.code for r in answer] == [Code.MALFORMED]
        assert says in answer[0].detail

    async def aborted() -> bool:
        return await released(run, "aborted") == 1

    assert await eventually(aborted)


async def test_a_stage_that_is_not_there_is_refused_by_name(run: Run) -> None:
    stage = StageWorker(run)
    take = GetStageWork(stage="critic", worker=stage.worker, max_groups=1)
    with pytest.raises(Refused, match="unknown stage: 'critic'"):
        await stage.client.call(take)
