"""Rows join and leave the running batch and close ranks without exchanging their tokens."""

import numpy as np

from staleflow.clients.rollout.engines.base import Request, Sampling, TokenSegment
from staleflow.clients.rollout.engines.running_batch import RunningBatch, uniforms
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.trajectory import Finish

NEVER = np.array([-1])


def ask(id: int, prompt: int = 3, prefix: tuple[TokenSegment, ...] = ()) -> Request:
    return Request(
        id=id, prompt_ids=np.arange(prompt, dtype=np.int32), sampling=Sampling(max_new_tokens=9), prefix=prefix
    )


def test_rows_that_leave_are_filled_from_the_end_and_keep_their_columns() -> None:
    rng = np.random.default_rng(0)
    rows, columns, written = RunningBatch(16), np.full(16, -1), dict[int, list[int]]()
    for id in range(500):
        if rows.size < 16:
            columns[rows.join(ask(id), 1000, Lineage(0), Version(id))] = id
            written[id] = []
        tokens = rng.integers(0, 100, rows.size)
        for row, token in enumerate(tokens.tolist()):
            written[int(columns[row])].append(token)
        rows.write(0, rows.size, tokens, -tokens.astype(np.float32))
        leaving = np.flatnonzero(rng.random(rows.size) < 0.1)
        for row in leaving.tolist():
            trajectory = rows.take(row, NEVER)
            assert trajectory.id == columns[row]
            assert trajectory.token_ids.tolist() == written[trajectory.id]
            assert trajectory.logprobs.tolist() == [-token for token in written[trajectory.id]]
            assert [s.version for s in trajectory.segments] == [trajectory.id]
        moves = rows.leave(leaving)
        columns[moves.targets] = columns[moves.sources]
        assert not set(moves.sources) & set(moves.targets)
        assert [rows.row(int(id)) for id in columns[: rows.size]] == list(range(rows.size))


def test_a_row_knows_where_its_tokens_stand() -> None:
    rows = RunningBatch(2)
    prefix = TokenSegment(
        lineage=Lineage(0), version=Version(1), token_ids=np.array([7, 8], np.int32), logprobs=np.zeros(2, np.float32)
    )
    rows.join(ask(0, prompt=3), 9, Lineage(0), Version(2))
    rows.join(ask(1, prompt=4, prefix=(prefix,)), 9, Lineage(0), Version(2))
    rows.write(0, 2, np.array([5, 6]), np.zeros(2, np.float32))
    assert rows.position.tolist() == [3, 6]
    assert rows.count.tolist() == [1, 3]
    assert rows.take(1, NEVER).token_ids.tolist() == [7, 8, 6]


def test_an_interrupt_that_comes_with_the_last_token_cuts_nothing() -> None:
    """If the trajectory counted as interrupted, another engine would be asked for one more token, which no engine can
    write."""
    rows = RunningBatch(2)
    for id in range(2):
        rows.join(ask(id), 2 + id, Lineage(0), Version(0))
        rows.interrupt(id)
    for _ in range(2):
        rows.write(0, 2, np.array([5, 6]), np.zeros(2, np.float32))
    assert rows.finished(NEVER).tolist() == [0, 1]
    assert [rows.take(row, NEVER).finish for row in range(2)] == [Finish.LENGTH, Finish.INTERRUPTED]


def test_uniform_numbers_depend_on_seed_and_place_alone_and_stay_below_one() -> None:
    seeds, counts = np.arange(100_000, dtype=np.uint64), np.zeros(100_000, np.int64)
    first = uniforms(seeds, counts)
    assert (first == uniforms(seeds, counts)).all()
    assert 0 <= first.min() < 1e-4
    assert 1 - 1e-4 < first.max() < 1
    assert abs(first.mean() - 0.5) < 0.005
    assert abs(np.corrcoef(first, uniforms(seeds, counts + 1))[0, 1]) < 0.02
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.02
