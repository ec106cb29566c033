"""A shard keeps the samples of moving groups in memory, for the instance that names the lease that left them."""

import msgspec
import numpy as np
import pytest

from staleflow.net.client import Client, worker_id
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId, LeaseId
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import Done, GetRows, PartialFrames, PutPartial, Rows
from staleflow.protocols.wire.tensors import arrays, specs_and_frames
from staleflow.protocols.wire.trajectory import GroupPayload
from staleflow.servers.trajectories import service
from staleflow.servers.trajectories.partials import OVERHEAD_BYTES, Partial, Partials
from staleflow.servers.trajectories.records import Key
from tests.servers.running import WEIGHTS, Run, payload


def samples(tokens: int = 5, seed: int = 0) -> tuple[PartialFrames, list[memoryview]]:
    """The samples that a lease leaves: two of version 0."""
    specs, frames = specs_and_frames(payload(0, tokens=tokens, seed=seed).to_arrays())
    return PartialFrames(origin=LeaseId(3), frames=specs), frames


def key(group: int, lease: int) -> Key:
    return Key(GroupId(group), LeaseId(lease))


NBYTES = Partial(key(0, 0), samples()[0], [bytes(frame) for frame in samples()[1]]).nbytes


def test_what_a_lease_left_is_found_under_that_lease_alone_and_as_often_as_it_is_asked_for() -> None:
    partials = Partials()
    header, frames = samples()
    partials.put(key(1, 5), header, frames)
    for _ in range(2):
        found = partials.find(key(1, 5))
        assert found is not None
        assert (found.header, found.frames) == (header, [bytes(frame) for frame in frames])
    assert partials.find(key(1, 4)) is partials.find(key(1, 6)) is partials.find(key(2, 5)) is None


def test_the_newest_lease_of_a_group_is_kept() -> None:
    partials = Partials()
    partials.put(key(1, 5), *samples())
    partials.put(key(1, 7), *samples(seed=1))
    assert partials.find(key(1, 5)) is None
    with pytest.raises(Refused):
        partials.put(key(1, 5), *samples())
    assert partials.find(key(1, 7)) is not None
    assert len(partials) == 1


def test_of_two_that_say_that_a_lease_left_them_the_first_counts() -> None:
    partials = Partials()
    header, frames = samples()
    partials.put(key(1, 5), header, frames)
    with pytest.raises(Refused, match="conflict: lease 5 of group 1 has already left other samples"):
        partials.put(key(1, 5), *samples(seed=1))
    found = partials.find(key(1, 5))
    assert found is not None
    assert found.frames == [bytes(frame) for frame in frames]


def test_the_worker_that_left_samples_may_replace_them_as_it_goes_on_after_a_refused_move() -> None:
    partials = Partials()
    partials.put(key(1, 5), *samples(), peer="a")
    header, frames = samples(seed=1)
    partials.put(key(1, 5), header, frames, peer="a")
    found = partials.find(key(1, 5))
    assert found is not None
    assert found.frames == [bytes(frame) for frame in frames]
    with pytest.raises(Refused, match="conflict: lease 5 of group 1 has already left other samples"):
        partials.put(key(1, 5), *samples(seed=2), peer="b")


def test_the_same_samples_under_another_header_are_other_samples() -> None:
    partials = Partials()
    header, frames = samples()
    partials.put(key(1, 5), header, frames)
    with pytest.raises(Refused, match="conflict: lease 5 of group 1 has already left other samples"):
        partials.put(key(1, 5), msgspec.structs.replace(header, origin=LeaseId(2)), frames)
    found = partials.find(key(1, 5))
    assert found is not None
    assert found.header == header


@pytest.mark.parametrize("origin", [-1, 0, 6])
def test_samples_cannot_have_begun_under_a_lease_that_is_none_or_later(origin: int) -> None:
    header, frames = samples()
    with pytest.raises(ProtocolError, match=f"lease 5 names {origin} as the one it began under"):
        Partials().put(key(1, 5), msgspec.structs.replace(header, origin=LeaseId(origin)), frames)


def test_a_push_of_a_later_lease_lets_it_go_and_one_of_its_own_lease_does_not() -> None:
    partials = Partials()
    partials.put(key(1, 5), *samples())
    partials.forget(GroupId(1), LeaseId(5))
    assert len(partials) == 1
    partials.forget(GroupId(1), LeaseId(6))
    assert len(partials) == 0


def test_without_room_the_oldest_go_and_what_never_fits_is_refused() -> None:
    partials = Partials(most_bytes=2 * NBYTES)
    for group in (1, 2, 1, 3):
        partials.put(key(group, 5 + group), *samples())
    assert [group for group in (1, 2, 3) if partials.find(key(group, 5 + group))] == [1, 3]
    with pytest.raises(Refused, match=r"the samples have \d+ bytes; at most"):
        partials.put(key(4, 9), *samples(tokens=5_000))
    assert len(partials) == 2


def test_what_is_no_group_is_refused() -> None:
    header, frames = samples()
    with pytest.raises(ProtocolError):
        Partials().put(key(1, 5), header, frames[:-1])
    lengths = np.array([5, -1], np.int32).view(np.uint8).data
    broken = [lengths if spec.name == "lengths" else frame for spec, frame in zip(header.frames, frames, strict=True)]
    with pytest.raises(ProtocolError):
        Partials().put(key(1, 5), header, broken)


def test_what_many_small_ones_take_is_bounded_too() -> None:
    """A hundred bytes of samples cost kilobytes to keep."""
    partials = Partials(most_bytes=1 << 20)
    for group in range(1_000):
        partials.put(key(group, 5), *samples())
    assert 0 < len(partials) <= (1 << 20) // OVERHEAD_BYTES


async def left(run: Run) -> tuple[Client, GetRows]:
    """Leave groups 3, 4 and 5 by lease 5, group 3 with many samples; return the request for all of them."""
    await run.trainer()
    shard, groups = run.shard(worker_id("rollout-9")), [GroupId(group) for group in (3, 4, 5)]
    for group in groups:
        header, frames = samples(5_000 if group == 3 else 5)
        assert await shard.ask(PutPartial(group=group, lease=LeaseId(5), partial=header), Done, frames) == Done()
    return shard, GetRows(groups=groups, partials=[LeaseId(5)] * 3)


async def test_an_answer_has_as_many_of_the_first_groups_as_fit_and_at_least_one(run: Run) -> None:
    shard, ask = await left(run)
    for most_bytes, groups in ((1, 1), (1 << 10, 1), (1 << 20, 3)):
        answer, frames = await shard.call(msgspec.structs.replace(ask, most_bytes=most_bytes))
        assert isinstance(answer, Rows)
        assert (len(answer.rows), len(answer.partials)) == (groups, groups)
        assert len(frames) == sum(len(partial.frames) for partial in answer.partials if partial is not None) > 0


async def test_samples_that_fit_no_answer_keep_no_others_out(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_ROW_BYTES", 4 * NBYTES)
    shard, ask = await left(run)
    answer, frames = await shard.call(ask)
    assert isinstance(answer, Rows)
    assert [row["prompt"] for row in answer.rows] == ["3 + 1", "4 + 1", "5 + 1"]
    assert answer.partials == [None, samples()[0], samples()[0]]
    assert [bytes(frame) for frame in frames] == 2 * [bytes(frame) for frame in samples()[1]]


async def test_they_come_with_the_rows_and_go_with_the_process(run: Run) -> None:
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    me = worker_id("rollout-9")
    shard = run.shard(me)
    header, frames = samples()
    put = PutPartial(group=GroupId(3), lease=LeaseId(5), partial=header)
    for _ in range(2):  # the reply was lost
        assert await shard.ask(put, Done, frames) == Done()
    ask = GetRows(groups=[GroupId(2), GroupId(3), GroupId(4)], partials=[LeaseId(0), LeaseId(5), LeaseId(5)])
    answer, came = await shard.call(ask)
    assert isinstance(answer, Rows)
    assert answer.partials == [None, header, None]
    assert [row["prompt"] for row in answer.rows] == ["2 + 1", "3 + 1", "4 + 1"]
    found = GroupPayload.from_arrays(arrays(header.frames, came))
    assert found.token_ids.tolist() == payload(0).token_ids.tolist()
    assert (await run.status(run.where.trajectories[0]))["partials"] == 1
    await run.stop("trajectories-0")
    run.trajectories()
    assert await shard.call(ask) == (Rows(rows=answer.rows, partials=[None] * 3), [])
    with pytest.raises(Refused, match="3 groups with 1 leases") as no:
        await shard.call(GetRows(groups=ask.groups, partials=[LeaseId(5)]))
    assert no.value.code is Code.MALFORMED
