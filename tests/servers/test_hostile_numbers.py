"""Servers refuse numbers that no honest peer sends and continue; each of these numbers once ended a server."""

import hashlib
from pathlib import Path

import msgspec
import pytest

from staleflow.net.errors import Unavailable
from staleflow.protocols.consistency.effects import Code, ReleaseWhy
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Segment, TrainerTerm, Version, WorkerId
from staleflow.protocols.wire.codec import ProtocolError, decode_request, encode_request
from staleflow.protocols.wire.manifest import check
from staleflow.protocols.wire.messages import (
    BeginPublish,
    BeginPublishReply,
    InstanceStats,
    Manifest,
    PushGroups,
    PushItem,
    RegisterPush,
    RegisterRelease,
    Report,
    Result,
    Results,
    TensorEntry,
)
from staleflow.protocols.wire.tensors import specs_and_frames
from staleflow.servers.trajectories.records import MAX_ID
from tests.servers.parameters.test_service import files
from tests.servers.running import WEIGHTS, Run, payload
from tests.servers.scheduler.table import Seat, Table
from tests.servers.scheduler.world import config, sha

EMPTY = hashlib.sha256(b"").hexdigest()


@pytest.mark.parametrize(("group", "lease"), [(-1, 1), (1, -1), (2**61, 1), (2**64 - 1, 2**64 - 1)])
async def test_a_push_of_no_group_is_refused_and_the_shard_goes_on(run: Run, group: int, lease: int) -> None:
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    rollout = await run.rollout()
    specs, frames = specs_and_frames(payload(0).to_arrays())
    item = PushItem(group=GroupId(group), lease=LeaseId(lease), worker=rollout.worker, truncated=False, frames=specs)
    (refused,) = (await rollout.shards[0].ask(PushGroups(items=[item]), Results, frames)).results
    assert refused == Result(
        code=Code.MALFORMED, detail=f"group {group} or lease {lease} is out of range; 0 to {MAX_ID - 1} are allowed"
    )
    results = await rollout.push(*(await rollout.leases(1))[:1])
    assert [result.code for result in results] == [None]


@pytest.mark.parametrize("why", [why for why in ReleaseWhy if why not in (ReleaseWhy.ABORTED, ReleaseWhy.FILTERED)])
def test_a_peer_gives_no_reason_of_release_that_is_the_ledgers_own(tmp_path: Path, why: ReleaseWhy) -> None:
    table = Table(tmp_path / "run", config())
    seat = Seat(table, "rollout-0")
    group = seat.holds()[0]
    op = RegisterRelease(group=GroupId(group), lease=seat.assign(group).lease, why=why)
    before = table.interpreter.machine.snapshot()
    (result,) = table.operate(op)
    assert (result.code, table.interpreter.machine.snapshot()) == (Code.MALFORMED, before)
    assert table.close().ok


def test_more_tokens_than_can_be_counted_are_refused(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config())
    seat = Seat(table, "rollout-0")
    held = seat.assign(seat.holds()[0])
    push = RegisterPush(
        group=held.group,
        lease=held.lease,
        worker=WorkerId("rollout-0"),
        shard=0,
        sha=sha(1),
        nbytes=1,
        truncated=False,
        segments=[Segment(Lineage(0), Version(0), 2**64 - 1)] * 2,
        samples=[1, 1],
        sequence_tokens=2,
    )
    assert [result.code for result in table.operate(push)] == [Code.MALFORMED]
    seat.finish(held.group)
    assert table.close().ok


@pytest.mark.parametrize("shard", [-1, 1, 2**63 - 1])
def test_a_push_to_a_shard_that_is_none_is_refused_and_no_trainer_asks_for_it_there(tmp_path: Path, shard: int) -> None:
    table = Table(tmp_path / "run", config())
    seat = Seat(table, "rollout-0")
    held = seat.assign(seat.holds()[0])
    push = RegisterPush(
        group=held.group,
        lease=held.lease,
        worker=WorkerId("rollout-0"),
        shard=shard,
        sha=sha(1),
        nbytes=1,
        truncated=False,
        segments=[Segment(held.lineage, held.version, 6)],
        samples=[3, 3],
        sequence_tokens=10,
    )
    before = table.interpreter.machine.snapshot()
    refused = Result(code=Code.MALFORMED, detail=f"shard is {shard}; it must be 0 to 0")
    assert (table.operate(push), table.interpreter.machine.snapshot()) == ([refused], before)
    seat.finish(held.group)
    assert table.close().ok


@pytest.mark.parametrize(
    "changed",
    [
        {"ack": 2**64 - 1},
        {"ack": -1},
        {"stats": InstanceStats(generated_tokens=2**63)},
        {"stats": InstanceStats(running=-1)},
    ],
)
def test_what_no_report_counts_is_no_message(changed: dict[str, object]) -> None:
    report = Report(worker=WorkerId("w"), ack=0, held=[], stats=InstanceStats())
    assert decode_request(encode_request(1, report))[1] == report
    with pytest.raises(ProtocolError):
        decode_request(encode_request(1, msgspec.structs.replace(report, **changed)))


@pytest.mark.parametrize(
    ("shape", "says"),
    [((2**62, 4), "a version has at most"), ((2**40, 2**40), "a version has at most"), ((1,) * 65, "65 dimensions")],
)
def test_a_version_that_no_file_can_hold_is_no_version(shape: tuple[int, ...], says: str) -> None:
    entry = TensorEntry(name="w", dtype="float32", shape=shape, offset=0, nbytes=4, digest=EMPTY)
    with pytest.raises(ProtocolError, match=says):
        check(Manifest(tensors=[entry], nbytes=4, sha=EMPTY))


async def test_a_version_larger_than_the_disk_is_refused_before_the_disk_is_filled(run: Run) -> None:
    trainer = await run.trainer()
    ask = BeginPublish(
        trainer_term=TrainerTerm(trainer.joined.trainer_term),
        lineage=Lineage(0),
        version=Version(0),
        batch=None,
        nbytes=2**46,
    )
    with pytest.raises(Unavailable, match=r"has 70368744177664 bytes; \d+ bytes are free"):
        await run.client(run.where.parameters, trainer.worker).ask(ask, BeginPublishReply, timeout_s=3)
    assert files(run) == set()
    assert (await trainer.publish(0, WEIGHTS)).version == 0
