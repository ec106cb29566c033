"""Shards describe prompts: the numbers have the documented meaning and reach the scheduler."""

from pathlib import Path

import numpy as np
import pytest

from staleflow.protocols.wire.messages import FEATURES
from staleflow.servers.trajectories.prompt_features import features
from tests.servers.running import Run, eventually


async def all_described(run: Run) -> bool:
    described: int = (await run.status(run.where.scheduler))["lengths"]["described"]
    return described == 40


def test_the_counted_features_of_a_prompt_are_what_they_are_called() -> None:
    row = {"prompt": "What is 12 + 345?\nWhat é"}
    words, chars = 6, 24
    counted = [
        np.log1p(chars),
        np.log1p(words),
        np.log1p(2),
        5 / chars,  # 12345
        2 / chars,  # W, W
        2 / chars,  # + ?
        1 / chars,  # é
        (4 + 2 + 2 + 3 + 4 + 1) / words,
        5 / words,
        np.log1p(2),
        np.log1p(3),
        np.log1p(1),
    ]
    assert features(row)[:12] == pytest.approx(np.array(counted), abs=2e-3)


def test_features_are_32_finite_half_precision_numbers_whatever_the_prompt() -> None:
    for prompt in ("", " ", "0" * 100_000, "字" * 50_000, "\n" * 70_000, "?" * 30_000, "a_b\x00\ud7ff"):
        given = features({"prompt": prompt})
        assert given.shape == (FEATURES,)
        assert given.dtype == np.dtype(np.float16)
        assert np.isfinite(given).all()


def test_words_leave_their_mark_in_the_hashed_features_and_their_order_does_not() -> None:
    assert (features({"prompt": "prove it now"}) == features({"prompt": "now prove it"})).all()
    other = features({"prompt": "count it now"})[12:]
    assert (features({"prompt": "prove it now"})[12:] != other).any()


def test_columns_that_name_a_kind_count_as_words_and_long_texts_and_measures_do_not() -> None:
    plain = features({"prompt": "one two"})
    assert (features({"prompt": "one two", "level": 5})[12:] != plain[12:]).any()
    assert (features({"prompt": "one two", "level": 5}) != features({"prompt": "one two", "level": 4})).any()
    assert (features({"prompt": "one two", "solution": "x" * 41, "score": 0.5, "steps": [1]}) == plain).all()


@pytest.mark.parametrize("started", [[0, 1], [1]])
async def test_the_prompts_that_come_next_are_described_by_whichever_shards_there_are(
    short_dir: Path, started: list[int]
) -> None:
    run = Run(short_dir, coordination={"ranker": "learned"}, trajectories={"shards": 2})
    run.scheduler()
    for shard in started:
        run.trajectories(shard)
    await eventually(lambda: all_described(run))
    status = await run.status(run.where.scheduler)
    assert status["lengths"] == {"ranker": "learned", "described": 40, "length/ranker_tau": 0.0, "length/ranker_n": 0}
    await run.close()


async def test_shards_describe_nothing_unless_lengths_are_learned(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def describe(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("staleflow.servers.trajectories.service.describe", describe)
    run = Run(short_dir)
    run.scheduler()
    run.trajectories()
    rollout = await run.rollout()
    status = await run.status(run.where.scheduler)
    assert rollout.worker
    assert status["lengths"] == {"ranker": "history", "described": 0, "length/ranker_tau": 0.0, "length/ranker_n": 0}
    await run.close()
