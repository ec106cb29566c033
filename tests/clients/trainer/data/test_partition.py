"""The partition assigns whole groups to ranks and balances their tokens."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from staleflow.clients.trainer.data.prefetch import shares


def test_the_longest_group_goes_first_each_to_the_rank_with_the_fewest_tokens() -> None:
    assert shares([5, 9, 4, 3, 7], 2) == [[1, 2], [0, 3, 4]]
    assert shares([5, 9, 4], 1) == [[0, 1, 2]]


def test_no_rank_is_left_without_a_group_even_where_groups_are_empty() -> None:
    assert shares([8, 0, 0], 3) == [[0], [1], [2]]
    assert shares([0, 0, 0, 0], 2) == [[0, 2], [1, 3]]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 8))
def test_every_group_has_one_rank_and_no_rank_is_more_than_its_shortest_group_above_the_mean(
    tokens: list[int], world: int
) -> None:
    parts = shares(tokens, world)
    assert sorted(place for part in parts for place in part) == list(range(len(tokens)))
    assert all(parts) or len(tokens) < world
    for part in parts:
        mine = [tokens[place] for place in part]
        assert (sum(mine) - min(mine, default=0)) * world <= sum(tokens)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8), st.integers(1, 4))
def test_no_rank_has_a_third_more_than_the_optimum(tokens: list[int], world: int) -> None:
    loads = [sum(tokens[place] for place in part) for part in shares(tokens, world)]
    assert 3 * max(loads) <= 4 * _optimum(tuple(tokens), (0,) * world)


@given(st.integers(0, 2**32 - 1), st.sampled_from((2, 4, 8)))
def test_ranks_are_within_two_percent_of_even_where_lengths_have_a_heavy_tail(seed: int, world: int) -> None:
    lengths = np.random.default_rng(seed).lognormal(7.0, 1.0, (256, 8)).clip(1, 32_768)
    tokens = [int(group.sum()) for group in lengths]
    loads = [sum(tokens[place] for place in part) for part in shares(tokens, world)]
    assert max(loads) <= 1.02 * sum(loads) / world


def _optimum(tokens: tuple[int, ...], loads: tuple[int, ...]) -> int:
    """Return the smallest possible maximum of the loads, once these groups are added to them in any way."""
    if not tokens:
        return max(loads)
    first, *rest = tokens
    # ranks with equal loads are interchangeable
    choices = {tuple(sorted((*loads[:rank], loads[rank] + first, *loads[rank + 1 :]))) for rank in range(len(loads))}
    return min(_optimum(tuple(rest), choice) for choice in choices)
