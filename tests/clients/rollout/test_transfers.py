"""Groups leave a worker and arrive at it, between a scheduler, a shard and an engine over real sockets."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from staleflow.clients.rollout import session, transfers
from staleflow.clients.rollout.engines.base import Request, check_request
from staleflow.net.adaptive_chunks import FIRST_BYTES
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import LeaseId
from staleflow.protocols.wire.messages import Abort, GetRows, Interrupt, PartialFrames, Yield
from staleflow.protocols.wire.partial_samples import partial_sha
from staleflow.protocols.wire.tensors import arrays, specs_and_frames
from staleflow.protocols.wire.trajectory import Finish
from tests.clients.rollout.engines.waiting import until
from tests.clients.rollout.peers import assign, pull
from tests.clients.rollout.test_worker import Paced, Play, loaded, playing

ONE = Yield(lease=LeaseId(1))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stalls is no reason for a group to stay."""
    monkeypatch.setattr(transfers, "PUT_TIMEOUT_S", 60.0)


def long() -> Paced:
    """An engine whose samples do not finish during a test."""
    return Paced(tokens=10**5, sigma=0.0, step_s=2e-3)


def another(folder: Path) -> Path:
    """Create a folder for the sockets of a second scene."""
    (folder / "2").mkdir()
    return folder / "2"


async def written(play: Play, tokens: int = 40) -> None:
    """Start group 1 and wait until it has some tokens."""
    await loaded(play)
    play.scheduler.order(assign(1))
    await until(lambda: play.engine.stats().generated_tokens > tokens)


async def test_a_group_leaves_with_what_it_has_and_its_lease_is_over_when_the_scheduler_says_so(
    short_dir: Path,
) -> None:
    async with playing(short_dir, long()) as play:
        await written(play)
        play.scheduler.order(ONE)
        await until(lambda: play.scheduler.held == [])
        header, left = play.shard.partial(1, 1)
        assert header.origin == 1
        assert left.finish.tolist() == [Finish.INTERRUPTED] * 4
        assert left.segment_summary() == [(0, 0, play.engine.stats().generated_tokens)]
        (op,) = play.scheduler.yielded
        assert (op.group, op.lease, op.lineage, op.version) == (1, 1, 0, 0)
        assert play.engine.stats().running == 0
        assert play.worker.counts["moved"] == 1
        assert (play.shard.offered, play.scheduler.released) == ([], [])


async def test_the_newest_version_that_wrote_is_named(short_dir: Path) -> None:
    async with playing(short_dir, long()) as play:
        await written(play)
        play.scheduler.order(pull(1))
        await loaded(play, 1)
        so_far = play.engine.stats().generated_tokens
        await until(lambda: play.engine.stats().generated_tokens > so_far + 40)
        play.scheduler.order(ONE)
        await until(lambda: play.scheduler.yielded)
        assert play.scheduler.yielded[0].version == 1
        assert [row[:2] for row in play.shard.partial(1, 1)[1].segment_summary()] == [(0, 0), (0, 1)]


async def test_a_group_that_arrives_goes_on_from_what_the_other_lease_left(short_dir: Path) -> None:
    async with playing(short_dir, long()) as play:
        await written(play)
        play.scheduler.order(ONE)
        await until(lambda: play.scheduler.held == [])
        left = play.shard.partial(1, 1)[1]
        play.scheduler.order(assign(1, lease=5, partial=1), assign(2))
        await until(lambda: play.engine.stats().running == 8)
        asked = play.shard.asked[-1]
        assert (asked.groups, asked.partials) == ([assign(1).group, assign(2).group], [LeaseId(1), LeaseId(0)])
        play.scheduler.order(Interrupt(lease=LeaseId(5)))
        await until(lambda: 1 in play.shard.payloads)
        pushed = play.shard.payloads[1]
        assert all(pushed.lengths >= left.lengths)
        start = begun = 0
        for length, before in zip(pushed.lengths, left.lengths, strict=True):
            assert pushed.token_ids[start : start + before].tolist() == left.token_ids[begun : begun + before].tolist()
            start, begun = start + int(length), begun + int(before)


async def test_groups_that_arrive_together_go_on_each_with_its_own(short_dir: Path) -> None:
    async with playing(short_dir, long()) as play:
        await loaded(play)
        play.scheduler.order(assign(1), assign(2))
        await until(lambda: play.engine.stats().generated_tokens > 80)
        play.scheduler.order(ONE, Yield(lease=LeaseId(2)))
        await until(lambda: play.scheduler.held == [])
        play.scheduler.order(assign(1, lease=5, partial=1), assign(3), assign(2, lease=6, partial=2))
        await until(lambda: play.engine.stats().running == 12)
        play.scheduler.order(*(Interrupt(lease=LeaseId(lease)) for lease in (5, 6)))
        await until(lambda: len(play.shard.payloads) == 2)
        for group in (1, 2):
            left, pushed = play.shard.partial(group, group)[1], play.shard.payloads[group]
            assert pushed.token_ids[: left.lengths[0]].tolist() == left.token_ids[: left.lengths[0]].tolist()


@pytest.mark.parametrize("why", ["the scheduler", "the shard", "a silent shard"])
async def test_what_may_not_leave_goes_on_under_its_lease(
    short_dir: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target is gone, or the shard has no room or does not answer: no token is lost, and none is generated
    twice."""
    if why == "a silent shard":
        monkeypatch.setattr(transfers, "PUT_TIMEOUT_S", 0.3)
    async with playing(short_dir, long()) as play:
        await written(play)
        play.scheduler.stays = Code.DENIED if why == "the scheduler" else None
        play.shard.no_partials = {"the shard": Code.OVERSIZE, "a silent shard": Code.BUSY}.get(why)
        play.scheduler.order(ONE)
        await until(lambda: play.shard.refused or play.scheduler.yielded)
        left = play.engine.stats().generated_tokens
        await until(lambda: play.engine.stats().generated_tokens > left + 40)
        assert (play.scheduler.held, len(play.scheduler.yielded)) == ([1], why == "the scheduler")
        play.scheduler.order(Interrupt(lease=LeaseId(1)))
        await until(lambda: 1 in play.shard.payloads)
        assert play.shard.payloads[1].num_tokens == play.engine.stats().generated_tokens
        await until(lambda: play.scheduler.held == [])
        assert (play.worker.counts["moved"], play.worker.counts["pushed"]) == (0, 1)


async def test_a_leaving_worker_hands_over_what_it_has_and_offers_again_what_nobody_could_take(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "HANDOVER_INTERVAL_S", 0.1)
    async with playing(short_dir, long()) as play:
        await written(play)
        play.scheduler.stays = Code.BUSY
        leaving = asyncio.ensure_future(play.worker.hand_over(60.0))
        await until(lambda: len(play.scheduler.yielded) >= 2)
        assert all(op.any_target for op in play.scheduler.yielded)
        assert play.scheduler.reports[-1].leaving
        so_far = play.engine.stats().generated_tokens
        await until(lambda: play.engine.stats().generated_tokens > so_far + 40)  # it works on meanwhile
        play.scheduler.stays = None
        await asyncio.wait_for(leaving, 30)
        await until(lambda: play.scheduler.held == [])
        assert (play.worker.counts["moved"], play.scheduler.released, play.shard.offered) == (1, [], [])


async def test_a_leaving_worker_waits_no_longer_than_it_may(short_dir: Path) -> None:
    async with playing(short_dir, long()) as play:
        await written(play)
        play.scheduler.stays = Code.DENIED
        await asyncio.wait_for(play.worker.hand_over(1.0), 30)
        await until(lambda: play.scheduler.yielded)
        assert play.scheduler.held == [1]


async def test_a_yield_of_a_lease_that_is_over_ends_it(short_dir: Path) -> None:
    async with playing(short_dir, long()) as play:
        await written(play)
        play.scheduler.stays = Code.STALE_LEASE
        play.scheduler.order(ONE)
        await until(lambda: play.scheduler.held == [])
        assert play.engine.stats().running == 0
        assert play.shard.offered == []


async def test_an_abort_ends_a_group_that_is_on_its_way_out(short_dir: Path) -> None:
    async with playing(short_dir, long()) as play:
        await written(play)
        play.shard.no_partials = Code.BUSY
        play.scheduler.order(ONE)
        await until(lambda: play.shard.refused)
        play.scheduler.order(Abort(lease=LeaseId(1)))
        await until(lambda: play.scheduler.held == [])
        assert play.scheduler.yielded == []


async def test_what_was_lost_on_the_way_is_begun_anew(short_dir: Path) -> None:
    async with playing(short_dir, Paced(tokens=8)) as play:
        await loaded(play)
        play.scheduler.order(assign(1, lease=5, partial=3))
        await until(lambda: 1 in play.shard.payloads)
        ask = GetRows(groups=[assign(1).group], partials=[LeaseId(3)], most_bytes=FIRST_BYTES)
        assert play.shard.asked == [ask]
        assert play.shard.payloads[1].num_tokens == play.engine.stats().generated_tokens


async def test_what_newer_weights_than_the_loaded_ones_began_is_begun_anew(short_dir: Path) -> None:
    """The versions within a sample never decrease."""
    async with playing(short_dir, long()) as first:
        await written(first)
        first.scheduler.order(pull(1))
        await loaded(first, 1)
        so_far = first.engine.stats().generated_tokens
        await until(lambda: first.engine.stats().generated_tokens > so_far + 40)
        first.scheduler.order(ONE)
        await until(lambda: first.scheduler.held == [])
        partials = first.shard.partials
    async with playing(another(short_dir), Paced(tokens=8)) as play:
        play.shard.partials = partials
        await loaded(play)
        play.scheduler.order(assign(1, lease=5, partial=1))
        await until(lambda: 1 in play.shard.payloads)
        assert play.shard.payloads[1].segment_summary() == [(0, 0, play.engine.stats().generated_tokens)]


async def test_newer_weights_on_their_way_are_waited_for(short_dir: Path) -> None:
    async with playing(short_dir, long()) as first:
        await loaded(first)
        first.scheduler.order(pull(1), assign(1, version=1))
        await until(lambda: first.engine.stats().generated_tokens > 40)
        first.scheduler.order(ONE)
        await until(lambda: first.scheduler.held == [])
        partials = first.shard.partials
    async with playing(another(short_dir), long()) as play:
        play.shard.partials = partials
        await loaded(play)
        play.scheduler.order(pull(1), assign(1, lease=5, partial=1))
        await until(lambda: play.engine.stats().generated_tokens > 40)
        play.scheduler.order(Interrupt(lease=LeaseId(5)))
        await until(lambda: 1 in play.shard.payloads)
        assert [row[:2] for row in play.shard.payloads[1].segment_summary()] == [(0, 1)]


async def test_a_group_that_is_done_is_pushed_and_the_yield_is_too_late(short_dir: Path) -> None:
    async with playing(short_dir, Paced(tokens=8)) as play:
        play.shard.hold = True
        await loaded(play)
        play.scheduler.order(assign(1))
        await until(lambda: play.shard.pushes)
        play.scheduler.order(ONE)
        await asyncio.sleep(0.1)
        play.shard.answer(play.shard.pushes[0])
        await until(lambda: play.scheduler.held == [])
        assert (play.scheduler.yielded, list(play.shard.payloads)) == ([], [1])


Left = tuple[PartialFrames, list[memoryview]]


def another_origin(header: PartialFrames, frames: list[memoryview]) -> Left:
    """Return the same samples with an impossible lease as their origin."""
    return msgspec.structs.replace(header, origin=LeaseId(-1)), frames


def another_token(header: PartialFrames, frames: list[memoryview]) -> Left:
    """Replace one token by a token beyond any vocabulary."""
    columns = {name: np.array(array) for name, array in arrays(header.frames, frames).items()}
    columns["token_ids"][0] = 2**31 - 1
    specs, changed = specs_and_frames(columns)
    return msgspec.structs.replace(header, frames=specs), changed


@pytest.mark.parametrize("known", [True, False], ids=["by its own digest", "by that of what was left"])
@pytest.mark.parametrize("change", [another_origin, another_token])
async def test_samples_that_another_worker_has_rewritten_end_neither_the_worker_nor_its_engine(
    short_dir: Path, change: Callable[..., Left], known: bool
) -> None:
    """``known``: the worker that rewrote the samples has reported the new digest to the scheduler, as their owner
    may."""
    async with playing(short_dir, long()) as play:
        await written(play)
        play.scheduler.order(ONE)
        await until(lambda: play.scheduler.held == [])
        left = play.shard.partials[1, 1]
        play.shard.partials[1, 1] = rewritten = change(*left)
        sha = partial_sha(*(rewritten if known else left))
        arriving = msgspec.structs.replace(assign(1, lease=5, partial=1), partial_sha=sha)
        so_far = play.engine.stats().generated_tokens
        play.scheduler.order(arriving, assign(2))
        await until(lambda: play.engine.stats().running == 8)
        await until(lambda: play.engine.stats().generated_tokens > so_far + 40)
        play.scheduler.order(Interrupt(lease=LeaseId(5)), Interrupt(lease=LeaseId(2)))
        await until(lambda: {1, 2} <= play.shard.payloads.keys())
        assert not play.running.done()


async def test_a_prefix_that_the_engine_refuses_costs_no_more_than_the_prefix(short_dir: Path) -> None:
    """The group starts again; the worker does not report it as one that no engine can serve."""
    async with playing(short_dir, Strict(tokens=8)) as play:
        await loaded(play)
        header, frames = await prefix_of(short_dir)
        play.shard.partials[1, 1] = another_token(header, frames)
        play.scheduler.order(assign(1, lease=5, partial=1))
        await until(lambda: 1 in play.shard.payloads)
        assert play.scheduler.released == []
        assert int(play.shard.payloads[1].token_ids.max()) < 256


class Strict(Paced):
    """A paced engine with a vocabulary."""

    def submit(self, request: Request) -> None:
        check_request(request, context=10**6, vocabulary=256)
        super().submit(request)


async def prefix_of(folder: Path) -> Left:
    """Return the part of group 1 that another worker leaves."""
    async with playing(another(folder), long()) as first:
        await written(first)
        first.scheduler.order(ONE)
        await until(lambda: first.scheduler.held == [])
        header, frames = first.shard.partials[1, 1]
        return header, [memoryview(bytes(frame)) for frame in frames]
