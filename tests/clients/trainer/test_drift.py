"""Engine and trainer are compared on tokens of the same weights, and old tokens that drifted too far are reported."""

import logging
from typing import Any

import msgspec
import pytest

from staleflow.clients.trainer.drift import MIN_TOKENS, STEPS, DriftWatch
from staleflow.configs.errors import ConfigError
from staleflow.protocols.consistency.ids import Step
from tests.clients.trainer.making import config


def watch(engine: str = "transformers", **trainer: Any) -> DriftWatch:
    made = config(**trainer)
    return DriftWatch(msgspec.structs.replace(made, rollout=msgspec.structs.replace(made.rollout, engine=engine)))


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the watch's own log lines; threads of earlier tests may log others."""
    return [record.getMessage() for record in caplog.records if record.name == DriftWatch.__module__]


def fresh(divergence: float, tokens: int = MIN_TOKENS) -> dict[str, float]:
    return {
        "trainer/tokens": float(tokens),
        "off_policy/share/age_0": 1.0,
        "mismatch_k1/age_0": divergence,
        "is_weight/ess/age_0": 1.0,
    }


def aged(age: int, ess: float, share: float = 1.0) -> dict[str, float]:
    return {
        "trainer/tokens": 100.0,
        f"off_policy/share/age_{age}": share,
        f"is_weight/ess/age_{age}": ess,
        f"mismatch_k1/age_{age}": 5.0,
    }


def test_a_run_whose_engine_computes_another_model_ends_at_its_first_fresh_tokens() -> None:
    with pytest.raises(ConfigError, match=r"max_mismatch is 0\.5; engine and trainer differ by 3 nats a token on 64"):
        watch().observe(Step(0), fresh(3.0))


def test_old_or_few_tokens_do_not_decide_and_later_steps_are_not_compared() -> None:
    one = watch()
    one.observe(Step(0), fresh(3.0, tokens=MIN_TOKENS - 1))
    one.observe(Step(1), aged(1, 1.0))
    one.observe(Step(2), fresh(1e-9))
    one.observe(Step(3), fresh(3.0))


def test_a_noticeable_mismatch_is_logged_and_0_disables_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        watch().observe(Step(0), fresh(1e-5))
        assert not reports(caplog)
        watch().observe(Step(0), fresh(0.1))
        watch(max_mismatch=0).observe(Step(0), fresh(9.0))
    assert [text[: text.index(" nats")] for text in reports(caplog)] == [
        "step 0: engine and trainer differ by 0.1",
        "step 0: engine and trainer differ by 9",
    ]


def test_simulated_engines_are_not_compared() -> None:
    watch("simulated").observe(Step(0), fresh(9.0))


def test_old_tokens_that_lost_half_of_their_sample_size_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    one = watch(lr=1e-3)
    for step in range(STEPS - 1):
        one.observe(Step(step), aged(1, 0.4))
    one.observe(Step(9), aged(1, 0.1, share=0.01))
    assert not reports(caplog), "an age with few tokens is not judged"
    for step in range(STEPS):
        one.observe(Step(10 + step), aged(1, 0.4) | aged(2, 0.3))
    (report,) = reports(caplog)
    assert "step 10: the weights move too far" in report
    assert "Lower trainer.lr from 0.001, or staleness.max_staleness from " in report


def test_numerics_are_not_reported_as_drift(caplog: pytest.LogCaptureFixture) -> None:
    one = watch()
    one.observe(Step(0), fresh(0.0) | {"is_weight/ess/age_0": 0.5})
    for step in range(1, 3 * STEPS):
        one.observe(Step(step), aged(2, 0.4))
    assert not reports(caplog)
