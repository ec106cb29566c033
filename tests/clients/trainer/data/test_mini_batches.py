"""Mini-batches divide the groups of a batch evenly, the same way on every rank and in every repetition."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from staleflow.clients.trainer.data.mini_batches import BatchGroups, mini_batches


def groups(*on_rank: int) -> BatchGroups:
    """Groups 0, 1, ...; ``on_rank``: how many each rank has."""
    count = sum(on_rank)
    ranks = np.repeat(np.arange(len(on_rank)), on_rank)
    return BatchGroups(ids=np.arange(count), ranks=ranks, tokens=np.ones(count, np.int64))


def plan(of: BatchGroups, count: int, *, seed: int = 0, step: int = 0, epoch: int = 0) -> list[list[int]]:
    return [chosen.tolist() for chosen in mini_batches(of, count, seed=seed, step=step, epoch=epoch)]


@given(
    on_rank=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    share=st.integers(1, 12),
    seed=st.integers(0, (1 << 32) - 1),
    step=st.integers(0, 1 << 40),
    epoch=st.integers(0, 63),
)
def test_each_group_is_in_one_mini_batch_and_sizes_differ_by_one_at_most_also_on_each_rank(
    on_rank: list[int], share: int, seed: int, step: int, epoch: int
) -> None:
    of = groups(*on_rank)
    count = min(share, sum(on_rank))
    found = plan(of, count, seed=seed, step=step, epoch=epoch)
    assert len(found) == count
    assert sorted(group for part in found for group in part) == list(range(sum(on_rank)))
    sizes = [len(part) for part in found]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1
    for rank in range(len(on_rank)):
        of_rank = [sum(int(of.ranks[group]) == rank for group in part) for part in found]
        assert max(of_rank) - min(of_rank) <= 1
    assert found == plan(of, count, seed=seed, step=step, epoch=epoch)


def test_the_order_depends_on_seed_step_and_epoch() -> None:
    of = groups(16, 16)
    plans = [plan(of, 4), plan(of, 4, seed=1), plan(of, 4, step=1), plan(of, 4, epoch=1)]
    assert all(plans[i] != plans[j] for i in range(4) for j in range(i))
