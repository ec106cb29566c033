"""A seeded permutation of the prompt rows, another one each epoch, place by place: a billion rows cost nothing."""

import numpy as np

_WORD, _ODD, _OTHER = np.uint64(0xFFFF_FFFF), np.uint64(0x9E37_79B1), np.uint64(0x85EB_CA77)


def permuted(start: int, count: int, rows: int, *, seed: int, epoch: int) -> list[int]:
    """Places ``start`` .. ``start + count - 1`` of a permutation of ``range(rows)``; another epoch, another order.

    Four Feistel rounds over the smallest square of a power of two that holds the rows, again for those that fall
    outside of them.
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
