"""Typed columns lie at their tokens in a padded batch, in its rows, in micro-batches and in a forward pass."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from staleflow.clients.trainer.data.batch import FetchedGroup, assemble, rows_of
from staleflow.clients.trainer.data.micro_batches import concatenated
from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.wire.typed_columns import TypedColumn, encode_columns
from tests.clients.trainer.making import header, payload

DECLARED = (
    TypedColumn(name="experts", per="token", dtype="int32", shape=(2,)),
    TypedColumn(name="image", per="sample", dtype="bytes"),
    TypedColumn(name="score", per="sample", dtype="int64"),
)


def member(group: int, lengths: list[int], *, prompt: int = 3, columns: bool = True) -> FetchedGroup:
    """A group whose experts are [token id, place in the completion]."""
    made, start = payload(group, lengths, prompt=prompt), 0
    samples: list[dict[str, Any]] = []
    for sample, tokens in enumerate(lengths):
        experts = np.stack([made.token_ids[start : start + tokens], np.arange(tokens)], 1).astype(np.int32)
        samples.append({"experts": experts, "image": bytes([group] * sample), "score": 1 << 40 | sample})
        start += tokens
    typed = encode_columns(DECLARED, samples, lengths) if columns else {}
    return FetchedGroup(group=GroupId(group), row={}, payload=replace(made, columns=typed))


def test_values_lie_at_their_tokens_and_groups_without_the_column_have_zeros() -> None:
    batch = assemble(header(0), [member(1, [2, 4]), member(2, [1, 3], prompt=5), member(3, [2, 2], columns=False)])
    experts = batch.token_columns["experts"]
    assert experts.dtype == np.dtype(np.int32)
    assert experts.shape == (*batch.input_ids.shape, 2)
    known = batch.completions & (batch.group_ids < 3)[:, None]
    assert np.array_equal(experts[known][:, 0], batch.input_ids[known])
    assert experts[known][:, 1].tolist() == [0, 1, 0, 1, 2, 3, 0, 0, 1, 2]
    assert not experts[~known].any()
    assert batch.sample_columns["image"].tolist() == [b"", b"\1", b"", b"\2", b"", b""]
    assert batch.sample_columns["score"].tolist() == [1 << 40, 1 << 40 | 1] * 2 + [0, 0]
    chosen = rows_of(batch, np.array([3, 1]))
    assert np.array_equal(chosen.token_columns["experts"], experts[[3, 1]])
    assert chosen.sample_columns["image"].tolist() == [b"\2", b"\1"]


def test_micro_batches_together_have_the_columns_of_the_whole_batch() -> None:
    members = [member(1, [2, 4]), member(2, [1, 9], prompt=5), member(3, [2, 2], columns=False)]
    whole = assemble(header(0), members)
    parts = [assemble(header(0), [one]) for one in members]
    joined = concatenated(parts, header(0))
    for mine, theirs in ((joined.token_columns, whole.token_columns), (joined.sample_columns, whole.sample_columns)):
        assert set(mine) == set(theirs)
        for name, column in mine.items():
            assert column.dtype == theirs[name].dtype
            assert np.array_equal(column, theirs[name])


def test_a_forward_pass_has_the_values_of_its_tokens() -> None:
    torch = pytest.importorskip("torch")
    from staleflow.clients.trainer.algorithms.objective import tokens_of

    batch = assemble(header(0), [member(1, [2, 4]), member(2, [1, 3], prompt=5)])
    tokens = tokens_of(batch, np.array([3, 1]), torch.device("cpu"))
    experts: Any = tokens.columns["experts"].numpy()
    assert experts[:, 1].tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert experts[:, 0].tolist() == [
        *batch.input_ids[3][batch.completions[3]],
        *batch.input_ids[1][batch.completions[1]],
    ]
