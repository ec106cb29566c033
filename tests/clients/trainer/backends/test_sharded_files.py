# pyright: basic, reportMissingImports=false
"""A model is built without weights, and its weights are loaded tensor by tensor."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from staleflow.clients.models.files import load_model
from staleflow.clients.trainer.backends.fsdp import FsdpLearner
from staleflow.clients.trainer.backends.sharded_files import WeightFiles, distinct, layers, open_model
from staleflow.configs.errors import ConfigError
from tests.clients.trainer.making import config
from tests.clients.trainer.ranked import ranked

CPU = torch.device("cpu")
ONE = "model.safetensors"


def saved(directory: Path, *, files: int = 1, dtype: torch.dtype = torch.float32, **keys: Any) -> Path:
    """Save a model with odd extents, so that no two ranks have equal parts."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(3)
    shape: dict[str, Any] = {
        "vocab_size": 21,
        "hidden_size": 33,
        "intermediate_size": 45,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 14,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "eos_token_id": [19, 20],
        "bos_token_id": None,
    }
    model: Any = Qwen3ForCausalLM(Qwen3Config(**(shape | keys)))  # type: ignore[no-untyped-call]
    size = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    model.to(dtype).save_pretrained(directory, max_shard_size=size + 1 if files == 1 else size // files)
    return directory


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of the model's safetensors files."""
    return {name: t for file in directory.glob("*.safetensors") for name, t in load_file(file).items()}


def rewritten(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace or remove (None) some tensors of the model's one file; ``__`` in a name stands for a dot."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    kept = {name: value for name, value in (tensors(directory) | named).items() if value is not None}
    save_file(kept, directory / ONE, metadata={"format": "pt"})


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_is_opened_without_weights_and_otherwise_as_it_is_loaded(tmp_path: Path, tied: bool) -> None:
    saved(tmp_path, tie_word_embeddings=tied)
    model, files = open_model(tmp_path, "bfloat16", CPU)
    whole = load_model(tmp_path, "bfloat16", CPU)
    assert files is not None
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    own, loaded = dict(model.named_parameters()), dict(whole.named_parameters())
    assert [(n, p.shape, p.dtype) for n, p in own.items()] == [(n, p.shape, p.dtype) for n, p in loaded.items()]
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not model.training
    assert model.generation_config.eos_token_id == whole.generation_config.eos_token_id == [19, 20]
    assert len(layers(model)) == 2


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5000.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
        {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_buffers_that_no_file_has_are_computed_in_float32(tmp_path: Path, rope: dict[str, Any]) -> None:
    saved(tmp_path, rope_parameters=rope)
    model, _ = open_model(tmp_path, "bfloat16", CPU)
    buffers = dict(model.named_buffers())
    wanted = dict(load_model(tmp_path, "bfloat16", CPU).named_buffers())
    assert buffers.keys() == wanted.keys() != set()
    for name, buffer in wanted.items():
        assert buffer.dtype == torch.float32
        assert torch.equal(buffers[name], buffer), name


def test_tensors_and_their_rows_are_read_from_one_file_or_several(tmp_path: Path) -> None:
    saved(tmp_path, files=3)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 1
    files, every = WeightFiles(tmp_path), tensors(tmp_path)
    assert files.shapes == {name: tuple(tensor.shape) for name, tensor in every.items()}
    for name, tensor in every.items():
        assert torch.equal(files.read(name, torch.empty_like(tensor)), tensor)
        some = torch.empty_like(tensor[11:21], dtype=torch.bfloat16)
        assert torch.equal(files.read(name, some, slice(11, 21)), tensor[11:21].to(torch.bfloat16))


def test_what_was_read_stays_when_the_file_goes(tmp_path: Path) -> None:
    saved(tmp_path)
    files, wanted = WeightFiles(tmp_path), tensors(tmp_path)["model.norm.weight"].clone()
    found = files.read("model.norm.weight", torch.empty(33), slice(0, 33))
    (tmp_path / ONE).write_bytes(b"")
    assert torch.equal(found, wanted)


def test_a_file_that_names_tensors_in_another_way_is_loaded_whole(tmp_path: Path) -> None:
    """The names lack the prefix: the library resolves them, this module does not."""
    saved(tmp_path)
    own = {name.removeprefix("model."): tensor for name, tensor in tensors(tmp_path).items()}
    save_file(own, tmp_path / ONE, metadata={"format": "pt"})
    model, files = open_model(tmp_path, "float32", CPU)
    assert files is None
    assert torch.equal(model.model.norm.weight, own["norm.weight"])


def test_a_tied_tensor_that_is_stored_under_both_names_is_the_librarys_to_judge(tmp_path: Path) -> None:
    saved(tmp_path, tie_word_embeddings=True)
    rewritten(tmp_path, lm_head__weight=tensors(tmp_path)["model.embed_tokens.weight"].clone())
    model, files = open_model(tmp_path, "float32", CPU)
    assert files is None
    assert model.lm_head.weight.device.type == "cpu"


def test_a_tied_tensor_may_be_stored_under_its_second_name(tmp_path: Path) -> None:
    saved(tmp_path, tie_word_embeddings=True)
    rewritten(
        tmp_path, lm_head__weight=tensors(tmp_path)["model.embed_tokens.weight"], model__embed_tokens__weight=None
    )
    model, files = open_model(tmp_path, "float32", CPU)
    assert files is not None
    (names,) = [names for _, names in distinct(model) if len(names) > 1]
    assert names == ["model.embed_tokens.weight", "lm_head.weight"]
    assert files.stored(names) == "lm_head.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model__norm__weight": None}, "missing model.norm.weight"),
        ({"model__norm__weight": torch.zeros(7)}, r"mismatched .*model.norm.weight"),
        ({"model__other__weight": torch.zeros(7)}, "unexpected model.other.weight"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    rewritten(saved(tmp_path), **change)
    with pytest.raises(ConfigError, match=said):
        open_model(tmp_path, "float32", CPU)


@pytest.mark.parametrize("damage", [(ONE, b"no tensors"), ("config.json", b"{"), (ONE, None)])
def test_a_directory_that_holds_no_model_is_refused(tmp_path: Path, damage: tuple[str, bytes | None]) -> None:
    saved(tmp_path)
    name, content = damage
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match="it must hold a causal language model"):
        open_model(tmp_path, "float32", CPU)


def test_what_is_float32_in_a_bfloat16_model_is_published_so_from_float32_shards() -> None:
    """``transformers`` loads these as float32 here and in engines: buffers, and parameters that the architecture
    names."""
    model = torch.nn.Module()
    model.gate, model.up = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    model.register_buffer("bias", torch.zeros(2))
    learner: Any = FsdpLearner.__new__(FsdpLearner)
    learner.model, learner._dtype, learner._wide = model, torch.bfloat16, ("gate.weight",)
    found = {name: tensor.dtype for name, tensor in learner.tensors()}
    assert found == {"bias": torch.float32, "gate.weight": torch.float32, "up.weight": torch.bfloat16}


RANKS = [
    pytest.param("fsdp", 2, id="fsdp"),
    pytest.param("deepspeed", 3, id="zero3", marks=[
        pytest.mark.long,
        pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="pip install -e '.[deepspeed]'"),
    ]),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "stage"), RANKS)
def test_ranks_with_unequal_parts_hold_the_files_together(tmp_path: Path, backend: str, stage: int) -> None:
    directory = saved(tmp_path / "model", files=3, dtype=torch.bfloat16)
    assert json.loads((directory / "config.json").read_bytes())["dtype"] == "bfloat16"
    wanted = tensors(directory)
    found = ranked(config(backend=backend, zero_stage=stage), directory, tmp_path / "ranks", 2, steps=[]).weights
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(torch.from_numpy(found[name]), tensor.to(torch.float32)), name
