"""A block of prompts is ordered by expected length."""

from hypothesis import given
from hypothesis import strategies as st

from staleflow.protocols.coordination.composition import clustered

LENGTHS = st.lists(st.sampled_from([0.0, 1.0, 2.5, 2.5, 7.0, 1e6]), max_size=40)


def test_a_block_is_put_in_order_of_expected_length() -> None:
    assert clustered([30.0, 10.0, 20.0], longest_first=True) == [0, 2, 1]
    assert clustered([30.0, 10.0, 20.0], longest_first=False) == [1, 2, 0]


def test_prompts_of_unknown_length_keep_their_place_and_the_others_are_ordered_round_them() -> None:
    assert clustered([10.0, 0.0, 30.0, 0.0, 20.0], longest_first=True) == [2, 1, 4, 3, 0]
    assert clustered([0.0, 0.0, 0.0], longest_first=True) == [0, 1, 2]


def test_prompts_of_equal_length_keep_their_order_in_both_directions() -> None:
    assert clustered([5.0, 9.0, 5.0, 5.0], longest_first=True) == [1, 0, 2, 3]
    assert clustered([5.0, 1.0, 5.0, 5.0], longest_first=False) == [1, 0, 2, 3]


@given(LENGTHS, st.booleans())
def test_whatever_is_expected_each_prompt_of_the_block_comes_once(lengths: list[float], longest_first: bool) -> None:
    order = clustered(lengths, longest_first=longest_first)
    assert sorted(order) == list(range(len(lengths)))
    assert [p for p in order if lengths[p] == 0] == [p for p in range(len(lengths)) if lengths[p] == 0]
    assert [place for place, p in enumerate(order) if lengths[p] == 0] == [p for p in order if lengths[p] == 0]
    known = [lengths[p] for p in order if lengths[p] > 0]
    assert known == sorted(known, reverse=longest_first)
