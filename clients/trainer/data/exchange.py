"""Move trajectories between the ranks of a trainer, so that each trains about as many tokens. NumPy only.

Consumes a rank's whole groups with their advantages, and produces the rows that this rank trains. Trajectories travel
as typed arrays in one blob for each pair of ranks, without padding.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.trainer.data.balance import balanced
from staleflow.clients.trainer.data.batch import NO_VERSION, TrainBatch, rows_of
from staleflow.clients.trainer.data.micro_batches import concatenated
from staleflow.configs.ranks import Place
from staleflow.protocols.wire.tensors import pack, unpack

Advantages = NDArray[np.float32]

PER_ROW = ("rewards", "group_ids", "completion_lengths")
PER_TOKEN = {"input_ids": 0, "behavior_logprobs": 0, "token_versions": NO_VERSION}
"""Value of the padding of each column."""
NOWHERE = -1
STAGE, COLUMN = "stage:", "column:"


class Exchanging(Protocol):
    """The communication between ranks that this module needs."""

    @property
    def place(self) -> Place: ...

    def gather(self, values: NDArray[Any]) -> NDArray[Any]: ...

    def exchange(self, blobs: Sequence[bytes]) -> list[bytes]: ...


def exchanged(batch: TrainBatch, advantages: Advantages, ranks: Exchanging) -> tuple[TrainBatch, Advantages] | None:
    """Return the rows that this rank trains, and their advantages; None if every rank keeps its rows.

    ``advantages``: flat over all completion tokens of the batch. Every rank must call it. Rows that come from other
    ranks have all columns of a pass, but not those of the prompt or of a sample, which only advantages use.
    """
    here, lengths = ranks.place.rank, batch.sequence_lengths
    own = np.stack([lengths, batch.group_ids, np.full_like(lengths, here)], axis=1)
    tokens, groups, fetched = ranks.gather(own).T
    target = balanced(tokens, groups, fetched, ranks.place.world)
    if target is fetched:
        return None
    mine = target[fetched == here]
    leaving = np.where(mine == here, NOWHERE, mine)
    sent = [np.flatnonzero(leaving == rank) for rank in range(ranks.place.world)]
    blobs = ranks.exchange([_encoded(batch, advantages, rows) for rows in sent])
    received = [_decoded(blob, batch) for blob in blobs]
    kept = np.flatnonzero(mine == here)
    received[here] = rows_of(batch, kept), _advantages_of(batch, advantages, kept)
    parts = [part for part in received if part is not None]
    return concatenated([part for part, _ in parts], batch), np.concatenate([each for _, each in parts])


def _advantages_of(batch: TrainBatch, advantages: Advantages, rows: NDArray[np.int64]) -> Advantages:
    chosen = np.isin(np.arange(len(batch.rewards)), rows)
    return advantages[np.repeat(chosen, batch.completion_lengths)]


def _encoded(batch: TrainBatch, advantages: Advantages, rows: NDArray[np.int64]) -> bytes:
    """Return some rows, ascending, and their advantages as a blob; empty without rows."""
    if not len(rows):
        return b""
    part = rows_of(batch, rows)
    inside = part.attention_mask.astype(np.bool_)
    arrays: dict[str, NDArray[Any]] = {name: getattr(part, name) for name in PER_ROW}
    arrays |= {name: getattr(part, name)[inside] for name in PER_TOKEN}
    arrays |= {STAGE + name: column[inside] for name, column in part.token_stages.items()}
    arrays |= {COLUMN + name: column[inside] for name, column in part.token_columns.items()}
    arrays["lengths"] = part.sequence_lengths
    arrays["loss_mask"] = part.loss_mask[inside].astype(np.uint8)
    arrays["advantages"] = _advantages_of(batch, advantages, rows)
    return pack(arrays)


def _decoded(blob: bytes, like: TrainBatch) -> tuple[TrainBatch, Advantages] | None:
    """Return rows of the same batch as ``like``, and their advantages; None for an empty blob."""
    if not blob:
        return None
    arrays = unpack(blob)
    lengths: NDArray[np.int64] = arrays["lengths"]
    inside = np.asarray(np.arange(int(lengths.max())) < lengths[:, None], np.bool_)

    def padded(column: NDArray[Any], fill: int = 0) -> NDArray[Any]:
        whole = np.full((*inside.shape, *column.shape[1:]), fill, column.dtype)
        whole[inside] = column
        return whole

    def columns(prefix: str) -> dict[str, NDArray[Any]]:
        return {name.removeprefix(prefix): padded(arrays[name]) for name in arrays if name.startswith(prefix)}

    given: dict[str, Any] = {name: arrays[name] for name in PER_ROW}
    given |= {name: padded(arrays[name], fill) for name, fill in PER_TOKEN.items()}
    part = replace(
        like,
        attention_mask=inside.astype(np.int64),
        loss_mask=padded(arrays["loss_mask"]).astype(np.bool_),
        cut=np.zeros(len(lengths), np.bool_),
        masked_tokens=0,
        rows=({},) * len(lengths),
        token_stages=columns(STAGE),
        token_columns=columns(COLUMN),
        sample_stages={},
        sample_columns={},
        **given,
    )
    return part, arrays["advantages"]
