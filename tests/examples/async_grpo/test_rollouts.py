# pyright: basic, reportMissingImports=false, reportPrivateImportUsage=false, reportArgumentType=false
"""``Rollouts`` gives TRL the batches of a real run, and publishes only steps that consumed exactly their batch."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("trl")

import torch
from transformers import TrainerControl, TrainerState
from trl.experimental.async_grpo import AsyncGRPOConfig

import staleflow
from staleflow.examples.async_grpo.rollouts import Rollouts
from staleflow.examples.async_grpo.samples import advantages_of
from tests.clients.trainer.service import Service, serving

FILL = "coordination.admission=fill"
STEP = 6
"""Samples of a batch: three groups of two."""
WEIGHTS = {"w": torch.ones(4)}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving(FILL) as service:
        service.wait_for("attach", 5)
        yield service


@pytest.fixture
def run(service: Service) -> Iterator[staleflow.Run]:
    with staleflow.connect(service.address, timeout_s=30) as run:
        yield run


def config_of(rollouts: Rollouts, **changes: Any) -> Any:
    return AsyncGRPOConfig("unused", bf16=False, **rollouts.arguments(2) | changes)


def begun(rollouts: Rollouts) -> Rollouts:
    """Do what TRL does before the first step."""
    args, state = config_of(rollouts), TrainerState(stateful_callbacks=[rollouts])
    rollouts.on_train_begin(args, state, TrainerControl())
    rollouts.init_weight_transfer()
    publish(rollouts)
    rollouts.update_model_version(1)
    rollouts.start()
    return rollouts


def publish(rollouts: Rollouts) -> None:
    rollouts.send_weights(iter(WEIGHTS.items()))


def take(rollouts: Rollouts, count: int) -> list[Any]:
    return [rollouts.rollout_buffer.get(timeout=60) for _ in range(count)]


def test_a_step_that_took_its_batch_and_one_micro_batch_more_is_published(service: Service, run: staleflow.Run) -> None:
    rollouts = begun(Rollouts(run))
    try:
        samples = take(rollouts, STEP + 2)
        assert [len({sample.group_id for sample in samples[:STEP]}), samples[0].model_version] == [3, 1]
        for sample in samples:
            assert len(sample.input_ids) == len(sample.completion_mask) == len(sample.old_log_probs)
            assert np.all(sample.old_log_probs[sample.completion_mask == 0] == 0)
            assert sample.completion_mask.sum() > 0
        publish(rollouts)
        assert len(service.trace("consume")) == 1
        take(rollouts, STEP - 1)
        with pytest.raises(RuntimeError, match="after 2 steps TRL has taken 13 samples, not 14"):
            publish(rollouts)
        assert len(service.trace("consume")) == 1
    finally:
        rollouts.stop()
        rollouts.destroy()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_staleness": 0}, "max_staleness"),
        ({"weight_sync_steps": 2}, "weight_sync_steps"),
        ({"token_budget": 512}, "token_budget"),
        ({"gradient_accumulation_steps": 1}, "a step must have the 6 samples of a batch"),
    ],
)
def test_arguments_that_break_the_promise_are_refused(
    run: staleflow.Run, changes: dict[str, Any], message: str
) -> None:
    rollouts = Rollouts(run)
    with pytest.raises(staleflow.ConfigError, match=message):
        rollouts.on_train_begin(config_of(rollouts, **changes), TrainerState(), TrainerControl())


def test_a_micro_batch_must_divide_the_batch(run: staleflow.Run) -> None:
    with pytest.raises(staleflow.ConfigError, match="must divide the 6 samples"):
        Rollouts(run).arguments(4)


@pytest.mark.parametrize(
    ("key", "value"), [("staleness", {"max_staleness": 0}), ("coordination", {"admission": "just_in_time"})]
)
def test_a_run_in_which_reading_ahead_could_stall_is_refused(
    run: staleflow.Run, key: str, value: dict[str, Any]
) -> None:
    from msgspec.structs import replace

    run.config = replace(run.config, **{key: replace(getattr(run.config, key), **value)})
    with pytest.raises(staleflow.ConfigError, match=next(iter(value))):
        Rollouts(run)


def test_advantages_are_those_of_trl() -> None:
    rewards, groups = np.array([1, 0, 0, 1, 1], np.float32), np.array([7, 7, 7, 2, 2])
    advantages, spreads = advantages_of(rewards, groups)
    mean, spread = 1 / 3, (2 / 9) ** 0.5
    np.testing.assert_allclose(advantages, [(1 - mean) / spread, *[-mean / spread] * 2, 0, 0], atol=1e-6)
    np.testing.assert_allclose(spreads, [spread] * 3 + [0] * 2)
