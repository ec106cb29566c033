"""SimulatedLengths needs no model: it draws the configured distribution, repeats it by seed, and derives half from the
prompt."""

import json
import math
from pathlib import Path
from statistics import NormalDist, fmean, median, pvariance

import pytest

from staleflow.clients.rollout.engines.simulated_lengths import SimulatedLengths, share
from staleflow.configs.simulation import Simulated

MANY = 4000
LONGEST = 16_384


def drawn(simulated: Simulated, seed: int = 0) -> list[int]:
    """Draw one trajectory for each of many prompts."""
    lengths = SimulatedLengths(simulated, seed)
    return [lengths.tokens(prompt, 7 * prompt, LONGEST) for prompt in range(MANY)]


@pytest.mark.parametrize("prompt_share", [0.0, 0.5, 1.0])
def test_lognormal_lengths_have_the_mean_and_the_spread(prompt_share: float) -> None:
    lengths = drawn(Simulated(mean_tokens=400, sigma=0.8, prompt_share=prompt_share))
    assert fmean(lengths) == pytest.approx(400, rel=0.07)
    assert math.sqrt(pvariance(math.log(tokens) for tokens in lengths)) == pytest.approx(0.8, rel=0.05)


def test_a_power_law_has_its_tail() -> None:
    lengths = drawn(Simulated(lengths="power_law", min_tokens=100, tail=1.5))
    assert min(lengths) == 100
    for beyond in (200, 400, 1600):
        assert sum(tokens > beyond for tokens in lengths) / MANY == pytest.approx((100 / beyond) ** 1.5, rel=0.2)


def test_two_modes_come_in_their_shares() -> None:
    lengths = drawn(Simulated(lengths="bimodal", mean_tokens=100, long_tokens=5000, sigma=0.2, long_share=0.2))
    long = [tokens for tokens in lengths if tokens > 1000]
    assert len(long) / MANY == pytest.approx(0.2, rel=0.1)
    assert fmean(long) == pytest.approx(5000, rel=0.05)
    assert fmean(tokens for tokens in lengths if tokens <= 1000) == pytest.approx(100, rel=0.05)


def test_uniform_lengths_are_all_as_likely() -> None:
    lengths = drawn(Simulated(lengths="uniform", min_tokens=3, max_tokens=6))
    for tokens in (3, 4, 5, 6):
        assert lengths.count(tokens) / MANY == pytest.approx(0.25, rel=0.1)
    assert sorted(set(lengths)) == [3, 4, 5, 6]


def test_lengths_of_a_trace_are_those_of_the_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps({"tokens": tokens}) + "\n" for tokens in (10, 10, 10, 500)))
    lengths = drawn(Simulated(lengths="trace", trace=str(file)))
    assert sorted(set(lengths)) == [10, 500]
    assert lengths.count(500) / MANY == pytest.approx(0.25, rel=0.1)


def test_nothing_is_longer_than_allowed_or_shorter_than_one_token() -> None:
    lengths = SimulatedLengths(Simulated(mean_tokens=3, sigma=3.0), seed=0)
    tokens = [lengths.tokens(prompt, prompt, 50) for prompt in range(MANY)]
    assert (min(tokens), max(tokens)) == (1, 50)


def test_half_of_the_spread_is_the_prompts() -> None:
    lengths = SimulatedLengths(Simulated(mean_tokens=1000, sigma=0.8, prompt_share=0.5), seed=1)
    logs = [[math.log(lengths.tokens(p, 100 * p + s, LONGEST)) for s in range(20)] for p in range(300)]
    assert pvariance(map(fmean, logs)) == pytest.approx(0.32 + 0.32 / 20, rel=0.25)


def test_what_is_expected_is_the_median_of_a_prompts_trajectories() -> None:
    lengths = SimulatedLengths(Simulated(mean_tokens=1000, sigma=0.8, prompt_share=0.5), seed=1)
    for prompt in range(3):
        tokens = [lengths.tokens(prompt, sample, LONGEST) for sample in range(1000)]
        assert median(tokens) == pytest.approx(lengths.expected(prompt, LONGEST), rel=0.1)


def test_the_same_numbers_give_the_same_length_and_others_another() -> None:
    simulated = Simulated(mean_tokens=1000)
    assert drawn(simulated) == drawn(simulated)
    assert drawn(simulated, seed=1) != drawn(simulated)
    lengths = SimulatedLengths(simulated, seed=0)
    assert len({lengths.tokens(1, sample, LONGEST) for sample in range(20)}) > 15


def test_shares_fill_the_open_unit_interval_evenly() -> None:
    shares = [share(3, number) for number in range(MANY)]
    assert all(0.0 < one < 1.0 for one in shares)
    assert fmean(shares) == pytest.approx(0.5, abs=0.02)
    assert pvariance(map(NormalDist().inv_cdf, shares)) == pytest.approx(1.0, rel=0.05)
