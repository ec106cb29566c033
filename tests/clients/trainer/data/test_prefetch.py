"""Claims become pieces, and every invalid claim restarts the step; a script plays the scheduler and the shards."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from staleflow.clients.trainer.data.batch import FetchedGroup
from staleflow.clients.trainer.data.micro_batches import MicroBatch, MicroBatchStream
from staleflow.clients.trainer.data.prefetch import NoBatch
from staleflow.net.client import Client
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import BatchId, GroupId, LeaseId, Lineage, Step, TrainerTerm, Version
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import Batch, Claims, Done, GetClaims, MemberRef, Reply
from tests.clients.trainer.making import payload

STEP = Step(4)


def member(group: int) -> MemberRef:
    return MemberRef(
        group=GroupId(group),
        lease=LeaseId(100 + group),
        lineage=Lineage(0),
        version=Version(3),
        sha=f"{group:064d}",
        shard=0,
        nbytes=50,
        sequence_tokens=5,
    )


def claims(*groups: int) -> Claims:
    return Claims(lineage=Lineage(0), step=STEP, members=[member(group) for group in groups], mask_below=Version(-1))


def sealed(*groups: int, batch: int = 9) -> Batch:
    return Batch(
        batch=BatchId(batch),
        lineage=Lineage(0),
        step=STEP,
        attempt=1,
        members=[member(group) for group in groups],
        digest="d",
        mask_below=Version(-1),
    )


class Script(MicroBatchStream):
    """Give the answers in order; refuse each ``corrupt`` group at its first fetch."""

    def __init__(self, *answers: Reply | Refused, size: int = 1, corrupt: Sequence[int] = ()) -> None:
        super().__init__(cast(Client, self), [], TrainerTerm(1), size=size)
        self._answers = list(answers)
        self._corrupt = list(corrupt)
        self.asked: list[list[int]] = []
        """Groups held at each request."""

    async def call(self, ask: GetClaims, *, timeout_s: float | None) -> tuple[Reply, list[memoryview]]:
        self.asked.append([lease - 100 for lease in ask.held])
        answer = self._answers.pop(0)
        if isinstance(answer, Refused):
            raise answer
        return answer, []

    async def _members(self, members: Sequence[MemberRef]) -> list[FetchedGroup]:
        for one in members:
            if one.group in self._corrupt:
                self._corrupt.remove(one.group)
                raise Refused(Code.STALE, f"group {one.group} is quarantined")
        return [FetchedGroup(group=m.group, row={}, payload=payload(m.group, [3, 2])) for m in members]

    async def all(self) -> list[MicroBatch]:
        return [piece async for piece in self.micro_batches(STEP)]


def seen(pieces: Sequence[MicroBatch]) -> list[tuple[bool, list[int], bool]]:
    """(first, groups, last) of each piece."""
    return [(p.first, list(dict.fromkeys(p.data.group_ids.tolist())), p.batch is not None) for p in pieces]


async def test_pieces_follow_the_order_of_the_claims_and_the_seal() -> None:
    script = Script(claims(5), claims(2), sealed(5, 2, 7))
    assert seen(await script.all()) == [(True, [5], False), (False, [2], False), (False, [7], True)]
    assert script.asked == [[], [5], [5, 2]]


@pytest.mark.parametrize("claimed", [0, 2, 4])
async def test_the_cut_is_the_same_however_much_was_claimed_before_the_seal(claimed: int) -> None:
    order = (5, 2, 7, 1, 3)
    early = [claims(*order[start : start + 2]) for start in range(0, claimed, 2)]
    script = Script(*early, sealed(*order), size=2)
    assert seen(await script.all()) == [(True, [5, 2], False), (False, [7, 1], False), (False, [3], True)]


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param((Refused(Code.CONFLICT, "no longer"), claims(2), sealed(2, 7)), id="refused"),
        pytest.param((sealed(2, 7), sealed(2, 7)), id="sealed otherwise"),
    ],
)
async def test_a_batch_that_no_longer_begins_with_what_is_held_begins_again(changed: tuple[Any, ...]) -> None:
    script = Script(claims(5), *changed)
    assert seen(await script.all()) == [(True, [5], False), (True, [2], False), (False, [7], True)]
    assert script.asked[:3] == [[], [5], []]


async def test_a_group_that_is_corrupt_begins_the_step_again_also_after_the_seal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asyncio, "sleep", _at_once(asyncio.sleep))
    script = Script(claims(5), sealed(5, 2, 7), sealed(5, 7, 8, batch=10), corrupt=[7])
    pieces = await script.all()
    again = [(True, [5], False), (False, [7], False), (False, [8], True)]
    assert seen(pieces) == [(True, [5], False), (False, [2], False), *again]
    assert pieces[-1].batch == sealed(5, 7, 8, batch=10)
    assert script.asked == [[], [5], []]


def _at_once(sleep: Callable[[float], Any]) -> Callable[[float], Any]:
    return lambda _: sleep(0)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Refused(Code.DENIED, "the prompts are used up"), NoBatch),
        (Refused(Code.FENCED, "another term"), Refused),
        (Refused(Code.STALE, "consumed"), Refused),
        (Done(), ProtocolError),
    ],
)
async def test_what_ends_the_stream_reaches_the_reader(answer: Reply | Refused, error: type[Exception]) -> None:
    script = Script(claims(5), answer)
    feeding = asyncio.create_task(script.feed_micro_batches(STEP, STEP + 1))
    assert (await script.micro_batch()).first
    with pytest.raises(error):
        await script.micro_batch()
    await feeding


async def test_a_piece_is_rows_of_no_batch_yet() -> None:
    (first, *_) = await Script(claims(5), sealed(5, 2)).all()
    assert (first.data.batch, first.data.digest, first.data.step) == (0, "", STEP)
    assert first.data.rewards.shape == (2,)
