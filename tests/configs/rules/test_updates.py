"""Several optimizer updates in a step: values that cannot work are rejected by name."""

from typing import Any

import msgspec
import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.rules.checks import consistent
from staleflow.configs.schema import Config


def config(**trainer: Any) -> Config:
    table = {
        "model": {"build": "somewhere:model"},
        "prompts": {"source": "somewhere:prompts"},
        "reward": {"run": "somewhere:reward"},
        "trainer": trainer,
    }
    return msgspec.convert(table, Config)


@pytest.mark.parametrize(
    "trainer",
    [
        {"minibatches": 8},
        {"epochs": 4, "minibatches": 3},
        {"epochs": 2, "backend": "fsdp", "nproc": 8, "minibatches": 8},
        {"epochs": 2, "algorithm": {"loss": "m2po"}},
    ],
)
def test_steps_of_several_updates_are_accepted(trainer: dict[str, Any]) -> None:
    consistent(config(**trainer))


@pytest.mark.parametrize(
    ("trainer", "key", "why"),
    [
        ({"minibatches": 9}, "trainer.minibatches", "each needs a group: at most trainer.batch_size = 8"),
        ({"minibatches": 2, "streaming": True}, "trainer.minibatches", "with trainer.streaming it must be 1"),
        ({"epochs": 2, "streaming": True}, "trainer.epochs", "with trainer.streaming it must be 1"),
    ],
)
def test_updates_that_a_step_cannot_have_are_rejected(trainer: dict[str, Any], key: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as error:
        consistent(config(**trainer))
    assert error.value.what == key
