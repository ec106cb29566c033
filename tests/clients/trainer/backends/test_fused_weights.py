# pyright: basic, reportMissingImports=false
"""Mixtures of experts: one tensor per expert in the files, one for all experts of a layer in the model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from staleflow.clients.models.files import load_model, save_model
from staleflow.clients.models.fused_weights import as_stored
from staleflow.clients.trainer.backends.sharded_files import distinct, open_model
from staleflow.clients.trainer.backends.tensors import named
from tests.clients.trainer.backends.test_sharded_files import RANKS
from tests.clients.trainer.making import config
from tests.clients.trainer.ranked import ranked

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "bos_token_id": None,
    "eos_token_id": 23,
    "pad_token_id": 0,
}


def saved(directory: Path, kind: str = "qwen3_moe", *, experts: int = 5, files: int = 1) -> Path:
    """Save a small random model; an odd number of experts, so that no two ranks have equal parts."""
    import transformers

    torch.manual_seed(3)
    cls: Any = {
        "qwen3_moe": transformers.Qwen3MoeConfig,
        "mixtral": transformers.MixtralConfig,
        "qwen3": transformers.Qwen3Config,
    }[kind]
    own = {"num_local_experts": experts} if kind == "mixtral" else {"num_experts": experts, "moe_intermediate_size": 8}
    build: Any = transformers.AutoModelForCausalLM.from_config
    model = build(cls(**SIZES, **own))
    size = sum(p.numel() for p in model.parameters()) * 4
    model.save_pretrained(directory, max_shard_size=size + 1 if files == 1 else size // files)
    return directory


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in directory.glob("model*.safetensors") for name, t in load_file(file).items()}


@pytest.mark.parametrize(("kind", "files"), [("qwen3_moe", 1), ("qwen3_moe", 3), ("mixtral", 1)])
def test_the_files_of_experts_are_read_as_they_are_loaded_whole(tmp_path: Path, kind: str, files: int) -> None:
    directory = saved(tmp_path, kind, files=files)
    model, opened = open_model(directory, "float32", CPU)
    assert opened is not None
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    whole = load_model(directory, "float32", CPU).state_dict()
    assert sum(name.endswith("experts.gate_up_proj") for name in whole) == 2
    for tensor, names in distinct(model):
        name = opened.stored(names)
        assert torch.equal(opened.read(name, torch.empty(tensor.shape)), whole[name]), name
        for rows in (slice(0, 3), slice(3, 5), slice(5, 5)):
            part = torch.empty_like(whole[name][rows])
            assert torch.equal(opened.read(name, part, rows), whole[name][rows]), name


def test_a_rank_reads_only_the_tensors_of_its_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from staleflow.clients.trainer.backends import sharded_files

    model, files = open_model(saved(tmp_path), "float32", CPU)
    assert files is not None
    read: list[str] = []

    class Counted:
        def __init__(self, path: Path) -> None:
            self._path = path

        def __enter__(self) -> "Counted":
            self._file = opened(self._path)
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def get_tensor(self, name: str) -> torch.Tensor:
            read.append(name)
            tensor: torch.Tensor = self._file.get_tensor(name)
            return tensor

    opened = sharded_files._open
    monkeypatch.setattr(sharded_files, "_open", Counted)
    shape = model.model.layers[1].mlp.experts.gate_up_proj.shape
    files.read("model.layers.1.mlp.experts.gate_up_proj", torch.empty(2, *shape[1:]), slice(3, 5))
    at = "model.layers.1.mlp.experts"
    assert read == [f"{at}.{expert}.{part}_proj.weight" for expert in (3, 4) for part in ("gate", "up")]


@pytest.mark.parametrize("lost", ["missing", "narrow"])
def test_experts_that_do_not_fit_together_are_the_librarys_to_judge(tmp_path: Path, lost: str) -> None:
    from staleflow.configs.errors import ConfigError

    name = "model.layers.0.mlp.experts.4.up_proj.weight"
    own = tensors(saved(tmp_path))
    own |= {name: own[name][:5].clone()} if lost == "narrow" else {}
    own = {key: value for key, value in own.items() if lost == "narrow" or key != name}
    save_file(own, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((ConfigError, RuntimeError)):
        open_model(tmp_path, "float32", CPU)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "qwen3"])
def test_a_streamed_checkpoint_has_the_names_of_the_first_one(tmp_path: Path, kind: str) -> None:
    directory, wanted = saved(tmp_path / "first", kind), tensors(tmp_path / "first")
    model, files = open_model(directory, "float32", CPU)
    assert files is not None
    values = {names[0]: files.read(files.stored(names), torch.empty(t.shape)) for t, names in distinct(model)}
    (tmp_path / "second").mkdir()
    save_model(model, values.items(), tmp_path / "second", dtype="float32", tokenizer_of=directory)
    found = tensors(tmp_path / "second")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    ids = torch.arange(16)[None]
    first, second = (load_model(tmp_path / one, "float32", CPU) for one in ("first", "second"))
    assert torch.equal(first(input_ids=ids).logits, second(input_ids=ids).logits)


def test_a_model_without_conversions_keeps_its_names(tmp_path: Path) -> None:
    model, _ = open_model(saved(tmp_path, "qwen3"), "float32", CPU)
    for name, tensor in named(model):
        assert [*as_stored(model, name, tensor)] == [(name, tensor)]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "stage"), RANKS)
def test_ranks_train_a_mixture_of_experts_that_none_of_them_loads(tmp_path: Path, backend: str, stage: int) -> None:
    directory = saved(tmp_path / "model", files=2)
    trainer = config(backend=backend, zero_stage=stage)
    saving = {"save": tmp_path / "checkpoint", "save_after": 0}
    outcome = ranked(trainer, directory, tmp_path / "ranks", 2, steps=[0], **saving)
    alone = ranked(config(), directory, tmp_path / "alone", steps=[0])
    assert not any("every rank reads the whole model" in text for text in outcome.said)
    assert outcome.weights.keys() == alone.weights.keys()
    for name, array in alone.weights.items():
        torch.testing.assert_close(torch.from_numpy(outcome.weights[name]), torch.from_numpy(array), msg=name)
    stored = tensors(tmp_path / "checkpoint")
    assert stored.keys() == tensors(directory).keys()
    again = load_model(tmp_path / "checkpoint", "float32", CPU).state_dict()
    assert all(torch.equal(again[name], torch.from_numpy(outcome.saved[name])) for name in again)
