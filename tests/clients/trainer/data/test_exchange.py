"""Trajectories that move to another rank have the same columns there, and each is on one rank."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from staleflow.clients.trainer.data.batch import FetchedGroup, TrainBatch, assemble, rows_of
from staleflow.clients.trainer.data.exchange import exchanged
from staleflow.configs.ranks import Place
from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.wire.typed_columns import TypedColumn, encode_columns
from tests.clients.trainer.making import header, payload

LIMIT_S = 100.0
TOKEN_COLUMNS = ("input_ids", "attention_mask", "loss_mask", "behavior_logprobs", "token_versions")
DECLARED = (
    TypedColumn(name="experts", per="token", dtype="int32", shape=(2,)),
    TypedColumn(name="image", per="sample", dtype="bytes"),
)


class Room:
    """Threads as ranks: each call of one waits for the same call of the others."""

    def __init__(self, world: int) -> None:
        self._barrier = threading.Barrier(world, timeout=LIMIT_S)
        self._sent: list[Any] = [None] * world

    def meet(self, rank: int, value: Any) -> list[Any]:
        self._sent[rank] = value
        self._barrier.wait()
        received = list(self._sent)
        self._barrier.wait()
        return received


class Thread:
    def __init__(self, room: Room, rank: int, world: int) -> None:
        self._room, self.place = room, Place(rank=rank, world=world)

    def gather(self, values: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate(self._room.meet(self.place.rank, values))

    def exchange(self, blobs: Sequence[bytes]) -> list[bytes]:
        return [sent[self.place.rank] for sent in self._room.meet(self.place.rank, blobs)]


def member(group: int, lengths: list[int], *, prompt: int = 3, columns: bool = True) -> FetchedGroup:
    """A group with typed columns, and the column of a reference model."""
    made, start = payload(group, lengths, prompt=prompt, version=group), 0
    samples: list[dict[str, Any]] = []
    for tokens in lengths:
        experts = np.stack([made.token_ids[start : start + tokens], np.arange(tokens)], 1).astype(np.int32)
        samples.append({"experts": experts, "image": b"image"})
        start += tokens
    if not columns:
        return FetchedGroup(group=GroupId(group), row={}, payload=made)
    stages = made.stages | {"stage/reference/logprobs:token": made.logprobs * 2}
    typed = encode_columns(DECLARED, samples, lengths)
    return FetchedGroup(group=GroupId(group), row={}, payload=replace(made, columns=typed, stages=stages))


def flat(batch: TrainBatch) -> NDArray[np.float32]:
    """An advantage for each completion token: its group and its token."""
    each = batch.group_ids[:, None] + batch.input_ids / 100
    return each[batch.completions].astype(np.float32)


def on_ranks(
    parts: Sequence[TrainBatch], act: Callable[[TrainBatch, Thread], Any]
) -> list[tuple[TrainBatch, NDArray[np.float32]] | None]:
    room, world = Room(len(parts)), len(parts)
    with ThreadPoolExecutor(world) as pool:
        pending = [pool.submit(act, part, Thread(room, rank, world)) for rank, part in enumerate(parts)]
        return [each.result(LIMIT_S) for each in pending]


def rows(batch: TrainBatch, advantages: NDArray[np.float32]) -> list[tuple[Any, ...]]:
    """Everything that a pass reads, row for row, without padding."""
    ends = batch.completion_lengths.cumsum()
    return [
        (
            *(getattr(batch, name)[row, :length].tolist() for name in TOKEN_COLUMNS),
            *(getattr(batch, name)[row].item() for name in ("rewards", "group_ids", "completion_lengths")),
            batch.token_columns["experts"][row, :length].tolist(),
            batch.token_stages["reference/logprobs"][row, :length].tolist(),
            advantages[end - batch.completion_lengths[row] : end].tolist(),
        )
        for row, (length, end) in enumerate(zip(batch.sequence_lengths, ends, strict=True))
    ]


def test_every_row_is_trained_once_with_all_that_a_pass_reads() -> None:
    """The long group of rank 0 is divided; no group of rank 1 has a typed column or one of the reference model."""
    members = [
        [member(0, [40, 31, 9, 22, 0]), member(1, [4, 5], prompt=6)],
        [member(2, [3, 2], columns=False)],
        [member(3, [8, 1], prompt=9)],
    ]
    parts = [assemble(header(0), part) for part in members]
    parts[0].loss_mask[1] = False
    parts[0].loss_mask[2, 5:] = False
    whole = assemble(header(0), [each for part in members for each in part])
    whole.loss_mask[1] = False
    whole.loss_mask[2, 5:] = False
    found = on_ranks(parts, lambda part, ranks: exchanged(part, flat(part), ranks))
    moved = [each for each in found if each is not None]
    assert len(moved) == 3
    loads = [int(batch.sequence_lengths.sum()) for batch, _ in moved]
    assert max(loads) <= 1.1 * sum(loads) / 3
    assert any(0 in batch.group_ids for batch, _ in moved[1:]), "the long group is divided"
    assert [batch.input_ids.shape[1] == batch.sequence_lengths.max() for batch, _ in moved].count(True) >= 1
    assert sorted(row for part in moved for row in rows(*part)) == sorted(rows(whole, flat(whole)))
    for part, before in zip(parts, members, strict=True):
        assert len(part.rewards) == sum(each.payload.num_samples for each in before), "the fetched part is unchanged"


def test_a_rank_without_groups_gets_rows() -> None:
    parts = [assemble(header(0), [member(0, [9, 8, 7, 6])])]
    parts.append(rows_of(parts[0], np.zeros(0, np.int64)))
    found = on_ranks(parts, lambda part, ranks: exchanged(part, flat(part), ranks))
    loads = [int(each[0].sequence_lengths.sum()) for each in found if each is not None]
    assert sorted(loads) == [21, 21]


@pytest.mark.parametrize("world", [2, 3])
def test_even_ranks_exchange_nothing(world: int) -> None:
    parts = [assemble(header(0), [member(rank, [5, 7])]) for rank in range(world)]
    assert on_ranks(parts, lambda part, ranks: exchanged(part, flat(part), ranks)) == [None] * world
