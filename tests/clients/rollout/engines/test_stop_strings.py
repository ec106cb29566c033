"""The end of a text is found token by token, whatever bytes a token writes."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from staleflow.clients.rollout.engines.stop_strings import StopStrings

PIECES = [b"a", b"b", b"ab", b"\n", b"User:", "é".encode(), *(bytes([byte]) for byte in "🙂".encode()), b""]
"""Tokens with one letter, several, a part of one, and none."""


def text(token_ids: Sequence[int]) -> str:
    return b"".join(PIECES[token] for token in token_ids).decode("utf-8", "replace")


def decode(completions: list[NDArray[np.int32]]) -> list[str]:
    return [text(ids.tolist()) for ids in completions]


def first_end(token_ids: Sequence[int], stops: Sequence[str]) -> int:
    """The definition: the shortest start whose text contains a stop string."""
    ends = (count for count in range(1, len(token_ids) + 1) if any(stop in text(token_ids[:count]) for stop in stops))
    return next(ends, 0)


visible = st.integers(0, len(PIECES) - 2)
"""A special token writes nothing; it may hide a string that begins far before it."""


@given(st.lists(visible, max_size=40), st.lists(st.sampled_from(["ab", "\nUser:", "é", "🙂a", "bbb"]), max_size=3))
def test_the_first_token_that_completes_a_string_is_found_in_portions_of_any_size(
    token_ids: list[int], stops: list[str]
) -> None:
    everything = np.array(token_ids, np.int32)
    wanted = first_end(token_ids, stops)
    for size in (1, 3, 50):
        found = 0
        for checked, end in pairwise([*range(0, len(token_ids), size), len(token_ids)]):
            found = found or StopStrings(stops, decode).end(everything[:end], checked)
        assert found == wanted


def test_only_a_short_text_is_decoded_for_each_token() -> None:
    decoded = list[int]()

    def counting(completions: list[NDArray[np.int32]]) -> list[str]:
        decoded.extend(len(ids) for ids in completions)
        return decode(completions)

    stops = StopStrings(["ab"], counting)
    for count in range(1, 500):
        assert stops.end(np.zeros(count, np.int32), count - 1) == 0
    assert max(decoded) < 10


def test_special_tokens_inside_a_string_do_not_hide_it() -> None:
    ids = np.array([0, len(PIECES) - 1, 1], np.int32)
    assert StopStrings(["ab"], decode).end(ids, 2) == 3
