"""Keys that save memory are refused by name where the trainer's backend has no such thing."""

from typing import Any

import msgspec
import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.explain import choices
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


@pytest.mark.parametrize("backend", ["torch", "ddp", "fsdp"])
def test_memory_is_saved_where_the_backend_can(backend: str) -> None:
    offload = {"torch": "optimizer", "ddp": "none", "fsdp": "parameters"}[backend]
    optimizer = "adamw" if backend == "fsdp" else "adamw_8bit"
    keys = {"optimizer": optimizer, "offload": offload, "offload_activations": True}
    consistent(config(backend=backend, gradient_checkpointing="selective", **keys))


@pytest.mark.parametrize(
    ("trainer", "error"),
    [
        (
            {"backend": "deepspeed", "optimizer": "adamw_8bit"},
            'trainer.optimizer is "adamw_8bit"; with trainer.backend "deepspeed" it must be "adamw"; torch and ddp '
            "have both",
        ),
        (
            {"backend": "ddp", "offload": "optimizer"},
            'trainer.offload is "optimizer"; it is for trainer.backend "torch", not for "ddp"; leave it at "none"',
        ),
        (
            {"backend": "torch", "offload": "parameters"},
            'trainer.offload is "parameters"; it is for trainer.backend "fsdp", not for "torch"; leave it at "none"',
        ),
        (
            {"backend": "deepspeed", "offload_activations": True},
            'trainer.offload_activations is true; with trainer.backend "deepspeed" it must be false; torch, ddp and '
            "fsdp have it",
        ),
        (
            {"backend": "deepspeed", "compile": True},
            'trainer.compile is true; with trainer.backend "deepspeed" it must be false; torch, ddp and fsdp have it',
        ),
        (
            {"backend": "torch", "compile": True, "gradient_checkpointing": "selective"},
            'trainer.compile is true; with trainer.gradient_checkpointing "selective", which needs single operations, '
            "it must be false",
        ),
    ],
)
def test_others_are_refused_by_name(trainer: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        consistent(config(**trainer))
    assert str(raised.value) == error


def test_the_values_of_a_key_of_booleans_and_names_are_completed() -> None:
    assert choices("trainer.gradient_checkpointing") == ("false", "selective", "true")
