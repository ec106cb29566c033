"""The ranks of a trainer get about as many tokens each, and every trajectory has one rank."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.clients.trainer.data.balance import MIN_GAIN, Ints, balanced, fullest
from staleflow.clients.trainer.data.prefetch import shares


def fetched(lengths: list[list[int]], world: int) -> tuple[Ints, Ints, Ints]:
    """Tokens, group and rank of each trajectory, in rank order as the ranks gather them."""
    parts = shares([sum(group) for group in lengths], world)
    rows = [(n, group, rank) for rank, part in enumerate(parts) for group in part for n in lengths[group]]
    tokens, groups, ranks = np.array(rows, np.int64).reshape(-1, 3).T
    return tokens, groups, ranks


LENGTHS = st.lists(st.lists(st.integers(1, 500), min_size=1, max_size=8), max_size=20)


@given(LENGTHS, st.integers(1, 9))
def test_ranks_that_exchange_are_within_one_trajectory_of_the_mean(lengths: list[list[int]], world: int) -> None:
    tokens, groups, ranks = fetched(lengths, world)
    found = balanced(tokens, groups, ranks, world)
    assert found.shape == tokens.shape
    assert set(found.tolist()) <= set(range(world))
    if found is ranks:
        return
    loads = [int(tokens[found == rank].sum()) for rank in range(world)]
    assert max(loads) <= tokens.sum() / world + tokens.max()
    assert fullest(tokens, ranks, world) > MIN_GAIN * fullest(tokens, found, world)
    assert len(set(found.tolist())) >= len(set(ranks.tolist())), "no rank becomes empty for another"
    assert np.array_equal(found, balanced(tokens.copy(), groups.copy(), ranks.copy(), world))


@pytest.mark.parametrize(
    ("groups", "size", "world", "whole", "moved"),
    [(64, 8, 8, 1.014, 1.02), (64, 16, 32, 1.70, 1.02), (64, 16, 64, 3.40, 1.02), (128, 16, 64, 1.90, 1.02)],
)
def test_lognormal_lengths_are_even_where_whole_groups_are_not(
    groups: int, size: int, world: int, whole: float, moved: float
) -> None:
    random, before, after = np.random.default_rng(0), list[float](), list[float]()
    for _ in range(20):
        base = np.exp(random.normal(7.5, 0.6, (groups, 1)))
        lengths = (base * np.exp(random.normal(0, 0.5, (groups, size)))).clip(50, 16_384).astype(np.int64)
        tokens, of, ranks = fetched(lengths.tolist(), world)
        before.append(fullest(tokens, ranks, world))
        after.append(fullest(tokens, balanced(tokens, of, ranks, world), world))
    assert np.mean(before) == pytest.approx(whole, rel=0.01)
    assert np.mean(after) <= moved
    assert max(after) <= 1.06


def test_even_ranks_keep_their_groups() -> None:
    tokens, groups, ranks = fetched([[5, 5], [4, 6], [7, 3]], 3)
    assert balanced(tokens, groups, ranks, 3) is ranks


def test_a_single_long_trajectory_moves_nothing_that_does_not_help() -> None:
    tokens, groups, ranks = fetched([[100], [5, 5]], 2)
    assert balanced(tokens, groups, ranks, 2) is ranks


def test_only_the_group_at_the_border_is_divided() -> None:
    tokens, groups, ranks = fetched([[10] * 8, [10] * 2, [10] * 2], 3)
    found = balanced(tokens, groups, ranks, 3)
    assert [tokens[found == rank].sum() for rank in range(3)] == [40, 40, 40]
    assert [set(found[groups == group].tolist()) for group in (1, 2)] == [{1}, {2}]


def test_a_group_that_moves_stays_together() -> None:
    """Ranks 0 and 1 have two groups each, ranks 2 and 3 have none."""
    tokens, groups = np.full(16, 10, np.int64), np.arange(4, dtype=np.int64).repeat(4)
    found = balanced(tokens, groups, groups // 2, 4)
    assert sorted(set(found[groups == group].tolist()).pop() for group in range(4)) == [0, 1, 2, 3]
    assert all(len(set(found[groups == group].tolist())) == 1 for group in range(4))


def test_ranks_without_an_excess_keep_everything() -> None:
    tokens, groups, ranks = fetched([[5] * 24, [9] * 4, [8] * 4, [7] * 4], 4)
    found = balanced(tokens, groups, ranks, 4)
    assert found is not ranks
    assert np.array_equal(found[ranks > 0], ranks[ranks > 0])
