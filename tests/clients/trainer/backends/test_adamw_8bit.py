# pyright: basic, reportMissingImports=false
"""Moments in 8 bits: a quarter of the memory, nearly the same steps, and exact resumption on every backend."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from staleflow.clients.trainer.backends.adamw import plain_parts
from staleflow.clients.trainer.backends.optimizer import MasterAdamW
from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.presence import check_packages
from staleflow.configs.rules.memory import check_memory
from tests.clients.trainer.making import config
from tests.clients.trainer.ranked import ranked

EIGHT_BITS = {"optimizer": "adamw_8bit", "lr": 0.01, "weight_decay": 0.1}
needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed: pip install -e '.[torchao]'"
)


def layer() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(64, 128)


def stepped(model: nn.Linear, optimizer: MasterAdamW, first: int, last: int) -> None:
    for number in range(first, last):
        random = torch.Generator().manual_seed(number)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=random).to(parameter.dtype)
        optimizer.collect()
        optimizer.step(number, lr_factor=1.0 + number)


def moments_bytes(optimizer: MasterAdamW) -> int:
    return sum(t.nbytes for name, t in optimizer.tensors().items() if name.startswith("adam/weight/exp_avg"))


@needs_torchao
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_with_8_bit_moments_are_nearly_those_of_adamw(dtype: torch.dtype) -> None:
    exact, coarse = layer().to(dtype), layer().to(dtype)
    start = coarse.weight.detach().clone().float()
    references = MasterAdamW(exact, config(**EIGHT_BITS | {"optimizer": "adamw"}).trainer)
    optimizer = MasterAdamW(coarse, config(**EIGHT_BITS).trainer)
    for model, each in ((exact, references), (coarse, optimizer)):
        stepped(model, each, 0, 5)
    moved, coarsely = (
        each.master_of(model.weight).detach() - start for model, each in ((exact, references), (coarse, optimizer))
    )
    assert 0 < float((coarsely - moved).norm()) < 0.05 * float(moved.norm())
    assert optimizer.master_of(coarse.weight).dtype == torch.float32
    assert torch.allclose(optimizer.master_of(coarse.bias), references.master_of(exact.bias), atol=1e-6)
    assert moments_bytes(optimizer) < 0.3 * moments_bytes(references)


@needs_torchao
def test_a_restored_optimizer_with_8_bit_moments_continues_bit_by_bit() -> None:
    settings, model, other = config(**EIGHT_BITS).trainer, layer(), layer()
    optimizer, restored = MasterAdamW(model, settings), MasterAdamW(other, settings)
    stepped(model, optimizer, 0, 3)
    other.load_state_dict(model.state_dict())
    restored.load({name: tensor.clone() for name, tensor in optimizer.tensors().items()})
    for one, each in ((model, optimizer), (other, restored)):
        stepped(one, each, 3, 6)
    assert torch.equal(model.weight, other.weight)
    states = [dict(each.tensors()) for each in (optimizer, restored)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@needs_torchao
def test_a_snapshot_restores_8_bit_moments() -> None:
    model = layer()
    optimizer = MasterAdamW(model, config(**EIGHT_BITS).trainer)
    stepped(model, optimizer, 0, 2)
    before = {name: tensor.clone() for name, tensor in (*optimizer.tensors().items(), *model.named_parameters())}
    snapshot = optimizer.snapshot()
    stepped(model, optimizer, 2, 4)
    assert not torch.equal(optimizer.tensors()["adam/weight/exp_avg.codes"], before["adam/weight/exp_avg.codes"])
    snapshot.restore()
    after = {**optimizer.tensors(), **dict(model.named_parameters())}
    assert after.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in after.items())


def test_plain_state_is_one_part_of_its_own_name() -> None:
    assert [name for name, _ in plain_parts("exp_avg", torch.zeros(3))] == ["exp_avg"]


@pytest.fixture(scope="module")
def wide_model_directory(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose matrices have enough values for 8-bit moments, even half of each."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    directory = tmp_path_factory.mktemp("wide")
    torch.manual_seed(7)
    small: Any = Qwen3Config.from_pretrained(model_directory)
    small.hidden_size, small.intermediate_size = 64, 256
    model: Any = Qwen3ForCausalLM(small)  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    tokenizer: Any = AutoTokenizer.from_pretrained(model_directory)
    tokenizer.save_pretrained(directory)
    return directory


@needs_torchao
@pytest.mark.slow
@pytest.mark.parametrize(("backend", "nproc"), [("torch", 1), pytest.param("ddp", 2, marks=pytest.mark.long)])
def test_ranks_with_8_bit_moments_resume_bit_by_bit(
    wide_model_directory: Path, tmp_path: Path, backend: str, nproc: int
) -> None:
    chosen, saved, steps = config(backend=backend, **EIGHT_BITS), tmp_path / "saved", list(range(4))
    straight = ranked(chosen, wide_model_directory, tmp_path / "one", nproc, steps=steps, save=saved, save_after=1)
    resumed = ranked(chosen, wide_model_directory, tmp_path / "two", nproc, steps=steps[2:], load=saved)
    assert resumed.column("loss") == straight.column("loss")[2:]
    from safetensors.torch import load_file

    stored = load_file(saved / "optimizer" / "rank-0-file-0.safetensors")
    assert any(name.endswith("/exp_avg.codes") for name in stored)
    weights = resumed.weights
    for name, array in straight.weights.items():
        assert (weights[name] == array).all(), name


def test_8_bit_moments_are_refused_by_name_where_there_are_none() -> None:
    with pytest.raises(ConfigError, match=r'trainer.optimizer.*"adamw_8bit".*"deepspeed" it must be "adamw"'):
        check_memory(config(**EIGHT_BITS, backend="deepspeed"))


def test_a_missing_torchao_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchao" else find(name))
    with pytest.raises(ConfigError, match=r"trainer\.optimizer.*torchao is not installed: pip install .*\[torchao\]"):
        check_packages(config(**EIGHT_BITS), "train")
