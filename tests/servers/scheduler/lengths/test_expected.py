"""Sample lengths are predicted from history and features, and the quality of the ranking is measured."""

import importlib
import math
from typing import Any

import numpy as np
import pytest

from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.wire.messages import FEATURES
from staleflow.servers.scheduler.lengths import expected
from staleflow.servers.scheduler.lengths.expected import LengthHistory, Lengths, Ranker, kendall_tau
from staleflow.servers.scheduler.lengths.log import CHUNK, TABLE
from staleflow.store.base import StoreFull
from staleflow.store.memory import MemoryStore

ROWS = 100_000


def ranker(kind: Ranker = "history", rows: int = ROWS) -> Lengths:
    made = Lengths(kind)
    made.rows = rows
    return made


def saved(made: Lengths, store: MemoryStore) -> None:
    with store.write() as txn:
        made.save(txn)
    made.saved()


def lost(made: Lengths, store: MemoryStore) -> None:
    """Save in a transaction that fails at commit."""
    with store.write() as txn:
        made.save(txn)
        raise StoreFull("no room")


def loaded(store: MemoryStore, kind: Ranker = "history") -> Lengths:
    made = ranker(kind)
    with store.read() as txn:
        made.load(txn)
    return made


class Workload:
    """Prompts whose features explain ``sd`` of the log-length's spread, with unexplained noise of log-sd 0.5."""

    def __init__(self, sd: float, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.features = random.standard_normal((ROWS, FEATURES)).astype(np.float16)
        self.features[:, 3] = np.exp(self.features[:, 3])
        self.features[:, 4] *= 1000.0
        self.knowable = sd * (self.features[:, 0] - self.features[:, 1]) / math.sqrt(2)
        self.lengths = np.exp(7.2 + self.knowable + 0.5 * random.standard_normal(ROWS))

    def play(self, made: Lengths, first: int, last: int) -> None:
        """Describe and push the groups of these rows, in steps of 64."""
        for start in range(first, last, 64):
            rows = list(range(start, start + 64))
            made.describe(rows, self.features[rows])
            for row in rows:
                made.observe(GroupId(row), [int(self.lengths[row])], truncated=False)
            made.learn()


# History --------------------------------------------------------------------------------------------------------------


def test_a_prompt_that_was_never_seen_has_no_expected_length() -> None:
    made = ranker()
    assert made.expected(GroupId(3)) == 0.0
    made.observe(GroupId(3), [100], truncated=False)
    assert made.expected_of([GroupId(3), GroupId(4)]) == [pytest.approx(100.0), 0.0]


def test_a_prompt_is_expected_to_be_as_long_as_its_samples_were_in_earlier_epochs() -> None:
    made = ranker(rows=10)
    made.observe(GroupId(3), [100, 400], truncated=False)
    assert made.expected(GroupId(13)) == pytest.approx(200.0)  # the mean of logarithms
    assert made.expected(GroupId(14)) == 0.0


def test_newer_lengths_of_a_prompt_count_more() -> None:
    made = ranker(rows=10)
    for epoch in range(6):
        made.observe(GroupId(3 + 10 * epoch), [100], truncated=False)
    made.observe(GroupId(63), [1000], truncated=False)
    assert 200 < made.expected(GroupId(73)) < 300


def test_a_sample_that_was_cut_off_counts_only_when_it_was_longer_than_expected() -> None:
    made = ranker()
    made.observe(GroupId(3), [500], truncated=True)
    assert made.expected(GroupId(3)) == 0.0
    made.observe(GroupId(3), [100], truncated=False)
    made.observe(GroupId(3), [50], truncated=True)
    assert made.expected(GroupId(3)) == pytest.approx(100.0)
    made.observe(GroupId(3), [900], truncated=True)
    assert made.expected(GroupId(3)) > 150
    assert made.quality()["length/ranker_n"] == 0


def test_without_a_ranker_nothing_is_remembered() -> None:
    made = ranker("none")
    made.observe(GroupId(3), [100], truncated=False)
    assert made.expected(GroupId(3)) == 0.0
    assert made.quality() == {"length/ranker_tau": 0.0, "length/ranker_n": 0}


def test_more_rows_than_slots_forget_the_older_of_two_that_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "SLOTS", 8192)
    history = LengthHistory()
    history.add(5, 1.0)
    history.add(8191, 2.0)
    history.add(5 + 8192, 3.0)
    means, weights = history.of([5, 8191, 5 + 8192, 6, 10**15])
    assert weights.tolist() == [0.0, 1.0, 1.0, 0.0, 0.0]
    assert means[1:3].tolist() == [2.0, 3.0]


# Restarts -------------------------------------------------------------------------------------------------------------


def test_a_restart_knows_what_was_observed_but_for_the_last_chunk_that_was_not_full() -> None:
    made, store = ranker(), MemoryStore([TABLE])
    for row in range(CHUNK):
        made.observe(GroupId(row), [10 + row], truncated=False)
    assert made.changed
    saved(made, store)
    assert not made.changed
    made.observe(GroupId(CHUNK), [77], truncated=False)
    again = loaded(store)
    assert again.expected_of([GroupId(0), GroupId(CHUNK - 1), GroupId(CHUNK)]) == [
        pytest.approx(10.0),
        pytest.approx(9.0 + CHUNK, rel=1e-5),
        0.0,
    ]


def test_chunks_that_no_commit_took_are_saved_with_the_next_one() -> None:
    made, store = ranker(), MemoryStore([TABLE])
    for row in range(CHUNK):
        made.observe(GroupId(row), [10], truncated=False)
    with pytest.raises(StoreFull):
        lost(made, store)
    with store.read() as txn:
        made.load(txn)  # as the interpreter does after a failed commit: nothing counts twice
    for row in range(CHUNK):
        made.observe(GroupId(CHUNK + row), [10], truncated=False)
    saved(made, store)
    again = loaded(store)
    assert min(again.expected_of([GroupId(row) for row in range(2 * CHUNK)])) == pytest.approx(10.0)


def test_the_store_keeps_a_bounded_number_of_observations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("staleflow.servers.scheduler.lengths.log.CHUNKS", 3)
    store = MemoryStore([TABLE])
    made = ranker()
    for row in range(4 * CHUNK):
        made.observe(GroupId(row), [10], truncated=False)
        saved(made, store)
    made = loaded(store)
    for row in range(4 * CHUNK, 5 * CHUNK):
        made.observe(GroupId(row), [10], truncated=False)
    saved(made, store)
    with store.read() as txn:
        assert txn.count(TABLE) == 3


# The model ------------------------------------------------------------------------------------------------------------


def test_the_learned_ranker_ranks_prompts_it_never_saw_nearly_as_well_as_the_noise_allows() -> None:
    workload, made = Workload(sd=0.75), ranker("learned")
    workload.play(made, 0, 4096)
    unseen = list(range(50_000, 51_000))
    made.describe(unseen, workload.features[unseen])
    expected = made.expected_of([GroupId(row) for row in unseen])
    best = kendall_tau([(float(workload.knowable[row]), float(workload.lengths[row])) for row in unseen])
    tau = kendall_tau([(length, float(workload.lengths[row])) for row, length in zip(unseen, expected, strict=True)])
    assert best > 0.58
    assert tau > 0.97 * best
    quality = made.quality()
    assert abs(quality["length/ranker_tau"] - best) < 0.08
    assert quality["length/ranker_n"] == 4096 - 64


def test_four_batches_teach_most_of_what_there_is_to_learn() -> None:
    workload, made = Workload(sd=0.75), ranker("learned")
    workload.play(made, 0, 256)
    unseen = list(range(50_000, 51_000))
    made.describe(unseen, workload.features[unseen])
    expected = made.expected_of([GroupId(row) for row in unseen])
    assert kendall_tau([(e, float(workload.lengths[row])) for row, e in zip(unseen, expected, strict=True)]) > 0.53


def test_lengths_that_features_do_not_tell_are_ranked_by_chance_and_expected_to_be_alike() -> None:
    workload, made = Workload(sd=0.0), ranker("learned")
    workload.play(made, 0, 4096)
    assert abs(made.quality()["length/ranker_tau"]) < 0.08
    unseen = list(range(50_000, 51_000))
    made.describe(unseen, workload.features[unseen])
    expected = np.log(made.expected_of([GroupId(row) for row in unseen]))
    assert float(expected.std()) < 0.15
    assert abs(float(expected.mean()) - 7.2) < 0.2


def test_prompts_without_features_are_unknown_to_the_learned_ranker_until_they_were_seen() -> None:
    workload, made = Workload(sd=0.75), ranker("learned")
    workload.play(made, 0, 256)
    assert made.expected(GroupId(50_000)) == 0.0
    made.observe(GroupId(50_000), [123], truncated=False)
    assert made.expected(GroupId(50_000)) == pytest.approx(123.0)


def test_a_model_that_learned_from_too_little_says_nothing() -> None:
    workload, made = Workload(sd=0.75), ranker("learned")
    made.describe([0, 1], workload.features[:2])
    made.observe(GroupId(0), [100], truncated=False)
    made.learn()
    assert made.expected(GroupId(1)) == 0.0


def test_what_a_prompt_had_weighs_more_than_what_its_features_say_and_more_so_each_time() -> None:
    workload, made = Workload(sd=0.75), ranker("learned")
    workload.play(made, 0, 1024)
    row = 50_000
    made.describe([row], workload.features[[row]])
    modelled = math.log(made.expected(GroupId(row)))
    seen = modelled + 2.0
    made.observe(GroupId(row), [round(math.exp(seen))], truncated=False)
    once = math.log(made.expected(GroupId(row)))
    made.observe(GroupId(row), [round(math.exp(seen))], truncated=False)
    twice = math.log(made.expected(GroupId(row)))
    assert once == pytest.approx((modelled + seen) / 2, abs=0.01)
    assert once < twice < seen


def test_a_model_that_has_only_seen_the_shortest_prompts_ranks_the_others_too() -> None:
    workload, made = Workload(sd=0.75), ranker("learned")
    shortest_first = np.argsort(workload.knowable[:1280])  # as a clustered deck deals a block
    for start in range(0, 256, 64):
        rows = shortest_first[start : start + 64].tolist()
        made.describe(rows, workload.features[rows])
        for row in rows:
            made.observe(GroupId(row), [int(workload.lengths[row])], truncated=False)
        made.learn()
    unseen = list(range(50_000, 51_000))
    made.describe(unseen, workload.features[unseen])
    expected = made.expected_of([GroupId(row) for row in unseen])
    assert kendall_tau([(e, float(workload.lengths[row])) for row, e in zip(unseen, expected, strict=True)]) > 0.48


def test_a_restart_has_the_model_again() -> None:
    workload, made, store = Workload(sd=0.75), ranker("learned"), MemoryStore([TABLE])
    workload.play(made, 0, 1024)
    saved(made, store)
    again = loaded(store, "learned")
    unseen = list(range(50_000, 51_000))
    again.describe(unseen, workload.features[unseen])
    expected = again.expected_of([GroupId(row) for row in unseen])
    assert kendall_tau([(e, float(workload.lengths[row])) for row, e in zip(unseen, expected, strict=True)]) > 0.55


def test_features_of_more_rows_than_are_remembered_push_the_oldest_out() -> None:
    made = ranker("learned")
    rows = list(range(10_000))
    made.describe(rows, np.zeros((10_000, FEATURES), np.float16))
    assert [made.described(row) for row in (0, 1807, 1808, 9_999)] == [False, False, True, True]
    made.describe([9_999], np.ones((1, FEATURES), np.float16))
    assert made.described(1808)


# The score of the ranking ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [3, 10, 10_000])
def test_kendalls_tau_is_that_of_scipy(levels: int) -> None:
    kendalltau: Any = importlib.import_module("scipy.stats").kendalltau
    random = np.random.default_rng(levels)
    x = random.integers(0, levels, 300).astype(float)
    y = x + random.integers(0, levels, 300)
    pairs = [(float(a), float(b)) for a, b in zip(x, y, strict=True)]
    assert kendall_tau(pairs) == pytest.approx(float(kendalltau(x, y).statistic))


def test_the_tau_of_nothing_to_rank_is_0() -> None:
    assert kendall_tau([]) == kendall_tau([(1.0, 2.0)]) == kendall_tau([(1.0, 2.0), (1.0, 3.0)]) == 0.0
