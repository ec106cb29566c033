"""The schedule sets the learning rate of every step."""

import math

import pytest

from staleflow.clients.trainer.backends.lr_schedule import learning_rate
from tests.clients.trainer.making import config


def rates(**trainer: object) -> list[float]:
    settings = config(lr=1.0, steps=7, **trainer).trainer
    return [learning_rate(settings, number) for number in range(settings.steps)]


def test_a_constant_rate_warms_up_and_stays() -> None:
    assert rates(warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1])
    assert rates() == [1.0] * 7


def test_a_linear_rate_falls_to_its_least_share_at_the_last_step() -> None:
    assert rates(lr_schedule="linear", warmup_steps=2, lr_min_share=0.2) == pytest.approx(
        [0.5, 1, 1, 0.8, 0.6, 0.4, 0.2]
    )
    assert rates(lr_schedule="linear")[-1] == 0.0


def test_a_cosine_rate_is_halfway_down_in_the_middle() -> None:
    found = rates(lr_schedule="cosine", lr_min_share=0.1)
    assert (found[0], found[3], found[6]) == pytest.approx((1.0, 0.55, 0.1))
    assert found[1] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 6)) / 2)


def test_warm_up_and_schedule_start_after_the_warm_up_of_the_critic() -> None:
    gae = {"critic_warmup": 2, "algorithm": {"advantage": "gae"}}
    assert rates(warmup_steps=2, **gae) == pytest.approx([0, 0, 0.5, 1, 1, 1, 1])
    assert rates(lr_schedule="linear", **gae) == pytest.approx([0, 0, 1, 0.75, 0.5, 0.25, 0])


def test_steps_beyond_the_last_keep_the_least_rate_and_a_run_of_warm_up_only_has_no_schedule() -> None:
    settings = config(lr=1.0, steps=3, lr_schedule="linear", lr_min_share=0.5).trainer
    assert learning_rate(settings, 10) == 0.5
    short = config(lr=1.0, steps=3, lr_schedule="cosine", warmup_steps=3).trainer
    assert [learning_rate(short, number) for number in range(3)] == pytest.approx([1 / 3, 2 / 3, 1])
