"""Spans of several ranks are a version only if they are every byte of every tensor exactly once."""

import pytest

from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.manifest import lay_out
from staleflow.protocols.wire.messages import WrittenSpan
from staleflow.protocols.wire.spans import by_tensor

PLACES = lay_out([("a", "float32", (10,), ""), ("none", "float32", (0, 3), ""), ("b", "bfloat16", (4, 4), "")])
"""Bytes 0 to 40, no bytes at 64, and bytes 64 to 96."""


def spans(*parts: tuple[int, int]) -> list[WrittenSpan]:
    """Spans from their first byte to the one after their last."""
    return [WrittenSpan(offset=start, nbytes=end - start, digest="") for start, end in parts]


def test_spans_are_sorted_into_their_tensors() -> None:
    a, b = spans((0, 12), (12, 40)), spans((64, 96))
    assert by_tensor(PLACES, [a[1], b[0], a[0]]) == [a, [], b]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([(64, 96)], "tensor 'a': bytes 0 to 40 of 40 are in no span"),
        ([(0, 40)], "tensor 'b': bytes 0 to 32 of 32 are in no span"),
        ([(4, 40), (64, 96)], "tensor 'a': bytes 0 to 4 of 40 are in no span"),
        ([(0, 40), (64, 80), (88, 96)], "tensor 'b': bytes 16 to 24 of 32 are in no span"),
        ([(0, 40), (64, 80)], "tensor 'b': bytes 16 to 32 of 32 are in no span"),
        ([(0, 40), (64, 84), (80, 96)], "tensor 'b': bytes 16 to 20 of 32 are in two spans"),
        ([(0, 40), (64, 96), (72, 80)], "tensor 'b': bytes 8 to 16 of 32 are in two spans"),
        ([(0, 40), (0, 40), (64, 96)], "tensor 'a': bytes 0 to 40 of 40 are in two spans"),
        ([(0, 96)], "tensor 'a': a span has bytes 0 to 96 of 40"),
        ([(0, 40), (40, 64), (64, 96)], "tensor 'a': a span has bytes 40 to 64 of 40"),
        ([(0, 40), (64, 96), (96, 128)], "tensor 'b': a span has bytes 32 to 64 of 32"),
        ([(0, 40), (20, 20), (64, 96)], "tensor 'a': a span has bytes 20 to 20 of 40"),
        ([(0, 40), (64, 32), (64, 96)], "tensor 'b': a span has bytes 0 to -32 of 32"),
        ([(-8, 40), (64, 96)], "a span starts at byte -8; the first byte of a version is 0"),
    ],
)
def test_spans_that_do_not_tile_are_refused_by_the_name_of_the_tensor(
    parts: list[tuple[int, int]], reason: str
) -> None:
    with pytest.raises(ProtocolError, match=reason):
        by_tensor(PLACES, spans(*parts))


def test_the_tensors_of_a_version_of_spans_have_no_digests_of_their_own() -> None:
    with pytest.raises(ProtocolError, match="tensor 'w' has a digest"):
        by_tensor(lay_out([("w", "float32", (2,), "0" * 32)]), spans((0, 8)))
