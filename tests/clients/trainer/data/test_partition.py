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
def test_every_group_has_one_rank_and_no_rank_has_a_third_more_than_it_must(tokens: list[int], world: int) -> None:
    parts = shares(tokens, world)
    assert sorted(place for part in parts for place in part) == list(range(len(tokens)))
    assert all(parts) or len(tokens) < world
    loads = [sum(tokens[place] for place in part) for part in parts]
    bound = max(max(tokens), sum(tokens) / world, *_pairs(tokens, world))
    assert max(loads) <= bound * 4 / 3 + 1


@given(st.integers(0, 2**32 - 1), st.sampled_from((2, 4, 8)))
def test_ranks_are_within_two_percent_of_even_where_lengths_have_a_heavy_tail(seed: int, world: int) -> None:
    lengths = np.random.default_rng(seed).lognormal(7.0, 1.0, (256, 8)).clip(1, 32_768)
    tokens = [int(group.sum()) for group in lengths]
    loads = [sum(tokens[place] for place in part) for part in shares(tokens, world)]
    assert max(loads) <= 1.02 * sum(loads) / world


def _pairs(tokens: list[int], world: int) -> list[int]:
    """With more groups than ranks, two of the world + 1 largest groups share a rank."""
    largest = sorted(tokens, reverse=True)[: world + 1]
    return [largest[-1] + largest[-2]] if len(largest) == world + 1 and world >= 1 and len(largest) > 1 else []
