"""The cost model of an instance's step is fitted from the reports of the instance."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.coordination.view import Cost
from staleflow.protocols.wire.messages import InstanceStats
from staleflow.servers.scheduler.coordination.costs import (
    EACH,
    FIT_INTERVAL,
    MAX_AGE,
    MAX_FITS,
    MIN_OBSERVATIONS,
    MIN_STEPS,
    SIZES,
    Costs,
    fitted,
)

TRUE = Cost(k1=7e-8, k2=0.0115, k3=1.25e-4, k4=9e-4)
"""A mixture-of-experts model of 30B parameters on one GPU, measured by StaleFlow's authors."""
A, B = WorkerId("a"), WorkerId("b")


def observed(cost: Cost, count: int, *, most: int, noise: float = 0.0, seed: int = 0) -> np.ndarray:
    """Return [count, 3]: samples, tokens in the cache, seconds of a step."""
    draw = np.random.default_rng(seed)
    samples = draw.uniform(1, most, count)
    kv = samples * draw.uniform(100, 4000, count)
    seconds = np.array([cost.step_s(n, tokens) for n, tokens in zip(samples, kv, strict=True)])
    return np.stack([samples, kv, seconds * (1 + noise * draw.standard_normal(count))], axis=1)


def worst(found: Cost | None, seen: np.ndarray, true: Cost) -> float:
    """Return the largest relative error of a step's time over the rows of ``seen``."""
    assert found is not None
    return max(abs(found.step_s(n, kv) / true.step_s(n, kv) - 1) for n, kv, _ in seen)


@pytest.mark.parametrize("most", [16, 64, 256, 1000])
def test_the_cost_of_what_was_seen_is_found(most: int) -> None:
    seen = observed(TRUE, 100, most=most)
    assert worst(fitted(seen), seen, TRUE) < 0.05


def test_noise_and_pauses_do_not_mislead() -> None:
    seen = observed(TRUE, 100, most=256, noise=0.05)
    seen[::10, 2] *= 5
    assert worst(fitted(seen), seen, TRUE) < 0.06


@given(
    k1=st.floats(0, 1e-6),
    k2=st.floats(1e-4, 0.1),
    k3=st.floats(0, 1e-3),
    k4=st.floats(0, 0.01),
    seed=st.integers(0, 99),
)
def test_no_part_of_a_fit_is_negative_and_none_is_far_off(
    k1: float, k2: float, k3: float, k4: float, seed: int
) -> None:
    true = Cost(k1=k1, k2=k2, k3=k3, k4=k4)
    seen = observed(true, 60, most=300, noise=0.02, seed=seed)
    found = fitted(seen)
    assert found is not None
    assert min(found.k1, found.k2, found.k3, found.k4) >= 0.0
    off = [abs(found.step_s(n, tokens) / true.step_s(n, tokens) - 1) for n, tokens, _ in seen]
    assert sum(off) / len(off) < 0.05


def test_an_engine_that_always_does_the_same_is_fitted_where_it_works() -> None:
    found = fitted(np.tile([8.0, 4000.0, 0.02], (MIN_OBSERVATIONS, 1)))
    assert found is not None
    assert found.step_s(8, 4000) == pytest.approx(0.02)


def test_a_few_observations_are_no_fit() -> None:
    assert fitted(observed(TRUE, MIN_OBSERVATIONS - 1, most=50)) is None


class Reports:
    """Reports of an instance while it decodes."""

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self.stats = InstanceStats()

    def decode(self, samples: int, kv: int, steps: int = MIN_STEPS) -> InstanceStats:
        """Report after ``steps`` decoding steps."""
        said = self.stats
        self.stats = InstanceStats(
            running=samples,
            kv_tokens=kv,
            steps=said.steps + steps,
            generated_tokens=said.generated_tokens + steps * samples,
            busy_s=said.busy_s + steps * self._cost.step_s(samples, kv),
        )
        return self.stats


def steady(reports: Reports, samples: int, kv: int) -> list[InstanceStats]:
    """Return three equal reports; the mean of any two describes the stretch between them."""
    return [reports.decode(samples, kv) for _ in range(3)]


def test_reports_make_a_fit() -> None:
    costs, reports = Costs(), Reports(TRUE)
    for samples in (2, 10, 40, 120, 200):
        for stats in steady(reports, samples, samples * 900):
            costs.observe(A, stats)
            costs.fit()
    found = costs.of(A)
    assert found is not None
    assert [found.step_s(n, 900 * n) / TRUE.step_s(n, 900 * n) for n in (2, 10, 40)] == pytest.approx(
        [1, 1, 1], rel=0.1
    )


def test_short_reports_are_added_up_and_idle_ones_are_none() -> None:
    costs, reports = Costs(), Reports(TRUE)
    for _ in range(10):
        costs.observe(A, reports.decode(4, 100, steps=MIN_STEPS // 4))
    assert costs.fit() == []
    for _ in range(4 * MIN_OBSERVATIONS):
        costs.observe(A, reports.decode(4, 100, steps=MIN_STEPS // 4))
    assert costs.fit() == [A]
    for _ in range(100):
        costs.observe(B, InstanceStats())
    assert costs.fit() == []


def test_a_counter_that_falls_is_no_observation() -> None:
    costs, reports = Costs(), Reports(TRUE)
    for _ in range(MIN_OBSERVATIONS):
        costs.observe(A, reports.decode(4, 100))
        costs.observe(A, InstanceStats())
        reports.stats = InstanceStats()
    assert costs.fit() == []


def test_fits_are_made_again_now_and_then_a_few_at_once() -> None:
    costs = Costs()
    many = [WorkerId(f"w{n}") for n in range(MAX_FITS + 2)]
    reports = {worker: Reports(TRUE) for worker in many}

    def decode(times: int) -> None:
        for worker in many:
            for n in range(times):
                costs.observe(worker, reports[worker].decode(4 + n, 100))

    decode(MIN_OBSERVATIONS + 1)
    assert costs.fit() == many[:MAX_FITS]
    assert costs.fit() == many[MAX_FITS:]
    assert costs.fit() == []
    decode(FIT_INTERVAL - 1)
    assert costs.fit() == []
    decode(1)
    assert costs.fit() == many[:MAX_FITS]


def test_an_engine_that_becomes_slower_is_found_out_and_what_is_kept_is_bounded() -> None:
    costs, reports = Costs(), Reports(TRUE)
    for n in range(2 * SIZES * EACH):
        costs.observe(A, reports.decode(1 + n % 50, 1000))
        costs.fit()
    slower = Reports(Cost(k1=0.0, k2=0.1, k3=0.0, k4=0.0))
    slower.stats = reports.stats
    for n in range(MAX_AGE):
        costs.observe(A, slower.decode(1 + n % 50, 1000))
        costs.fit()
    found = costs.of(A)
    assert found is not None
    assert found.step_s(20, 1000) == pytest.approx(0.1, rel=0.02)


def test_who_is_gone_is_forgotten() -> None:
    costs, reports = Costs(), Reports(TRUE)
    for _ in range(MIN_OBSERVATIONS + 1):
        costs.observe(A, reports.decode(4, 100))
    costs.forget(A)
    assert costs.fit() == []
    assert costs.of(A) is None
    costs.forget(B)
