# pyright: basic, reportMissingImports=false
"""An adapter is trained, published, saved and resumed alone; trainer, engine and ``peft`` compute the same policy."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from staleflow.clients.models.lora import BASE, FILE
from staleflow.clients.rollout.engines.base import LoadError, Sampling
from staleflow.clients.rollout.engines.transformers.engine import generate
from staleflow.clients.rollout.engines.transformers.model import open_transformers
from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.configs.errors import ConfigError
from staleflow.configs.lora import Lora
from staleflow.configs.schema import Config, Model
from staleflow.protocols.consistency.ids import Lineage, Step, Version
from tests.clients.trainer.making import batch, config
from tests.clients.trainer.ranked import ranked

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def settings(dtype: Any = "float32", lora: dict[str, Any] | None = None, **trainer: Any) -> Config:
    adapter = msgspec.convert({"rank": 4, **(lora or {})}, Lora)
    return msgspec.structs.replace(config(**trainer), model=Model(dtype=dtype, lora=adapter))


def trained(trainer: TorchTrainer, *steps: int) -> dict[str, float]:
    values: dict[str, float] = {}
    for step in steps:
        result = trainer.train(batch(step), Step(step), lambda: False)
        assert result.bad == ""
        values = result.values
    return values


def copied(trainer: TorchTrainer) -> dict[str, Any]:
    return {name: array.copy() for name, array in trainer.weights().items()}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(input_ids=IDS).logits
    return output


def base_of(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    load: Any = AutoModelForCausalLM.from_pretrained
    return load(directory, dtype=dtype).eval()


def test_version_0_is_the_base_model_and_every_version_is_the_adapter_alone(model_directory: Path) -> None:
    trainer = TorchTrainer(settings(), model_directory)
    base = base_of(model_directory)
    assert torch.equal(logits(trainer.model), logits(base))
    first = copied(trainer)
    trained(trainer, 0, 1)
    assert not torch.equal(logits(trainer.model), logits(base))
    frozen = trainer.model.state_dict()
    assert all(torch.equal(frozen[name], tensor) for name, tensor in base.state_dict().items() if "norm" in name)
    assert all(
        torch.equal(frozen[name.replace("proj.weight", "proj.base_layer.weight")], tensor)
        for name, tensor in base.state_dict().items()
    )
    second = copied(trainer)
    moved = {name for name in first if not np.array_equal(first[name], second[name])}
    assert moved == first.keys() - {BASE}
    assert len(moved) == 2 * 2 * 7, "A and B of seven linear layers in two blocks"
    trainer.load(None)
    assert same(copied(trainer), first)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_adapter_is_bit_identical_to_one_that_never_stopped(
    model_directory: Path, tmp_path: Path, dtype: str
) -> None:
    given = settings(dtype, micro_tokens=40, warmup_steps=3)
    straight = TorchTrainer(given, model_directory)
    expected = trained(straight, 0, 1, 2, 3)
    stopped = TorchTrainer(given, model_directory)
    trained(stopped, 0, 1)
    stopped.save(tmp_path)
    kept = copied(stopped)
    trained(stopped, 2)
    for resumed in (stopped, TorchTrainer(given, model_directory)):  # a rollback in place, and a new process
        resumed.load(tmp_path)
        assert same(copied(resumed), kept)
        assert trained(resumed, 2, 3) == expected
        assert same(copied(resumed), copied(straight))


def test_a_checkpoint_opens_in_peft_computes_the_same_and_merges(model_directory: Path, tmp_path: Path) -> None:
    trainer = TorchTrainer(settings(), model_directory)
    trained(trainer, 0, 1, 2)
    trainer.save(tmp_path)
    published = copied(trainer)
    assert set(load_file(tmp_path / FILE)) == published.keys() - {BASE}
    opened: Any = PeftModel.from_pretrained(base_of(model_directory), tmp_path)
    assert opened.peft_config["default"].base_model_name_or_path == str(model_directory)
    assert torch.equal(logits(opened), logits(trainer.model))
    merged = opened.merge_and_unload()
    torch.testing.assert_close(logits(merged), logits(trainer.model), rtol=1e-4, atol=1e-5)
    assert (logits(merged) - logits(base_of(model_directory))).abs().max() > 1e-3
    assert AutoTokenizer.from_pretrained(tmp_path).vocab_size == 20
    assert not (tmp_path / "config.json").exists(), "it would be taken for a whole model"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_with_a_published_version_samples_from_the_policy_of_the_trainer(
    model_directory: Path, dtype: Any
) -> None:
    given = settings(dtype)
    trainer = TorchTrainer(given, model_directory)
    trained(trainer, 0, 1, 2)
    engine, _ = open_transformers(given, model_directory)
    engine.load(copied(trainer), Lineage(0), Version(3))
    assert torch.equal(logits(engine.model), logits(trainer.model))
    [[one]] = generate(engine, [[1, 2, 3]], 1, Sampling(max_new_tokens=8))
    ids = torch.tensor([[1, 2, 3, *one.token_ids.tolist()]])
    with torch.no_grad():
        scored = trainer.model(input_ids=ids).logits[0, 2:-1].float().log_softmax(-1)
    expected = scored[torch.arange(len(one.token_ids)), torch.from_numpy(one.token_ids).long()]
    torch.testing.assert_close(
        torch.from_numpy(one.logprobs), expected, rtol=0, atol=1e-5 if dtype == "float32" else 0.1
    )


def test_an_engine_over_another_base_refuses_the_adapter_and_keeps_its_own(
    model_directory: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(model_directory, other)
    model = base_of(model_directory)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    model.save_pretrained(other)
    trainer = TorchTrainer(settings(), model_directory)
    trained(trainer, 0)
    engine, _ = open_transformers(settings(), other)
    before = logits(engine.model)
    with pytest.raises(LoadError, match=r"over a base model with digest [0-9a-f]{32}; the one of this engine has"):
        engine.load(copied(trainer), Lineage(0), Version(1))
    assert torch.equal(logits(engine.model), before)
    (tmp_path / "saved").mkdir()
    trainer.save(tmp_path / "saved")
    with pytest.raises(ConfigError, match="trained over a base model with digest"):
        TorchTrainer(settings(), other).load(tmp_path / "saved")


@pytest.mark.parametrize("keys", [{"packing": True}, {"gradient_checkpointing": True}, {"micro_tokens": 20}])
def test_packed_recomputed_and_cut_passes_train_the_same_adapter(model_directory: Path, keys: dict[str, Any]) -> None:
    plain, other = TorchTrainer(settings(), model_directory), TorchTrainer(settings(**keys), model_directory)
    trained(plain, 0, 1)
    trained(other, 0, 1)
    for name, array in copied(plain).items():
        np.testing.assert_allclose(copied(other)[name], array, rtol=0, atol=2e-5, err_msg=name)


@pytest.mark.long
def test_two_ranks_train_the_adapter_of_one(model_directory: Path, tmp_path: Path) -> None:
    alone = TorchTrainer(settings(), model_directory)
    trained(alone, 0, 1)
    both = ranked(settings(backend="ddp", nproc=2), model_directory, tmp_path, 2, steps=[0, 1])
    assert both.weights.keys() == copied(alone).keys(), "\n".join(both.said)
    for name, array in copied(alone).items():
        np.testing.assert_allclose(both.weights[name], array, rtol=0, atol=2e-5, err_msg=name)


def test_a_run_starts_from_an_adapter_of_another(model_directory: Path, tmp_path: Path) -> None:
    first = TorchTrainer(settings(), model_directory)
    trained(first, 0, 1)
    first.save(tmp_path)
    second = TorchTrainer(settings(lora={"path": str(tmp_path)}), model_directory)
    assert same(copied(second), copied(first))
    for lora, why in (
        ({"rank": 8}, "its r is 4; this run has 8"),
        ({"alpha": 16}, "its lora_alpha is 32; this run has 16"),
        ({"target_modules": ["q_proj"]}, "only one of both has base_model.model.model.layers.0.mlp.down_proj"),
    ):
        with pytest.raises(ConfigError, match=f"^model.lora.path .*{why}"):
            TorchTrainer(settings(lora={"path": str(tmp_path), **lora}), model_directory)


@pytest.mark.parametrize("layers", [["nowhere"], ["embed_tokens"]])
def test_layers_that_can_have_no_adapter_are_refused(model_directory: Path, layers: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"^model.lora.target_modules .*{layers[0]} is no linear layer of the"):
        TorchTrainer(settings(lora={"target_modules": layers}), model_directory)
