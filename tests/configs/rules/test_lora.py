"""Trainers and engines that handle no adapter, and keys without an adapter, are refused by name."""

from pathlib import Path

import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import load
from staleflow.configs.loading.presence import check_model_dir, present
from tests.configs.conftest import MINIMAL, Write

TRAINS = ("trainer.backend=torch", "rollout.engine=transformers", "model.build=somewhere:build")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["model.lora.alpha=8"], "model.lora.alpha is 8.0; it is for model.lora.rank above 0; leave it at 32.0"),
        (["model.lora.path=/a"], 'model.lora.path is "/a"; it is for model.lora.rank above 0; leave it at ""'),
        (
            ["model.lora.rank=8", "trainer.backend=fsdp"],
            'trainer.backend is "fsdp"; with model.lora it must be one of "torch", "ddp": others train no adapter',
        ),
        (["model.lora.rank=8", "trainer.run=a:b"], "with model.lora only the built-in trainer knows what to publish"),
        (
            ["model.lora.rank=8", "rollout.engine=vllm_server"],
            'rollout.engine is "vllm_server"; a running server gets whole models only',
        ),
        (
            ["model.lora.rank=8", 'rollout.pool=[{engine="transformers"}, {engine="vllm_server"}]'],
            'rollout.pool[1].engine is "vllm_server"; a running server gets whole models only',
        ),
        (
            ["rollout.engine=vllm", "rollout.vllm.options.max_lora_rank=8"],
            "rollout.vllm.options.max_lora_rank is 8; another key sets this argument of vLLM: use model.lora.rank",
        ),
    ],
)
def test_what_has_no_adapter_is_refused(write: Write, overrides: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(write(), [*TRAINS, *overrides])
    assert line in str(refused.value)


def test_an_adapter_is_configured_by_its_rank_alone(write: Write, tmp_path: Path) -> None:
    lora = load(write(), [*TRAINS, "trainer.backend=ddp", "model.lora.rank=16"]).model.lora
    assert (lora.rank, lora.alpha, lora.target_modules, lora.path) == (16, 32.0, [], "")
    text = f'{MINIMAL}\n[model]\nbuild = "somewhere:build"\n[model.lora]\nrank = 2\npath = "mine"\n'
    given = load(write(text.replace('backend = "simulated"', 'backend = "torch"'))).model.lora
    assert given.path == str(tmp_path / "mine"), "relative to the file"


def test_an_adapter_is_no_model_and_a_model_no_adapter(write: Write, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"^model.path is .*; it is an adapter of peft, not a model: name its base"):
        check_model_dir(tmp_path)
    (tmp_path / "model").mkdir()
    config = load(write(), [*TRAINS, "model.lora.rank=2", f"model.lora.path={tmp_path / 'model'}"])
    with pytest.raises(ConfigError, match=r"^model.lora.path is .*; it has no adapter_config.json"):
        present(config, ask=lambda question: {})
