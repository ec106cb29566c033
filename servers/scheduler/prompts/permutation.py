"""A seeded permutation of the prompt rows for each epoch, computed by place: memory does not grow with the rows."""

import numpy as np

_WORD, _ODD, _OTHER = np.uint64(0xFFFF_FFFF), np.uint64(0x9E37_79B1), np.uint64(0x85EB_CA77)


def permuted(start: int, count: int, rows: int, *, seed: int, epoch: int) -> list[int]:
    """Return places ``start`` .. ``start + count - 1`` of the permutation of ``range(rows)`` for a seed and an epoch.

    Four Feistel rounds over the smallest even power of two that is at least ``rows``; values outside the range are
    mapped again until they fall inside (cycle walking), which keeps the mapping a permutation.
    """
    half = max(((rows - 1).bit_length() + 1) // 2, 1)
    mask = (1 << half) - 1
    keys = np.random.SeedSequence((seed, epoch)).generate_state(4, np.uint32).astype(np.uint64)
    places = np.arange(start, start + count, dtype=np.uint64)
    outside = np.ones(count, dtype=np.bool_)
    while outside.any():
        left, right = places[outside] >> half, places[outside] & mask
        for key in keys:
            mixed = (right ^ key) * _ODD & _WORD
            mixed = (mixed ^ mixed >> 15) * _OTHER & _WORD
            left, right = right, left ^ (mixed >> 7 & mask)
        places[outside] = left << half | right
        outside = places >= rows
    return places.tolist()
