# pyright: basic, reportMissingImports=false
"""Compiled layers: the same steps, no new compilation for new lengths, and plain reasons where it is not possible."""

import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from staleflow.clients.trainer.backends.compilation import check_compiler
from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.configs.errors import ConfigError
from staleflow.protocols.consistency.ids import Step
from tests.clients.trainer.making import batch, config
from tests.clients.trainer.ranked import ranked

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # of torch's compiler in torch
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute:UserWarning"),  # the same
]
CPU = torch.device("cpu")
LENGTHS = ((5, 9, 2, 7), (3, 12, 6, 8), (11, 4, 10, 1), (2, 3, 2, 4))
KINDS: list[dict[str, Any]] = [{}, {"share_prompts": False}, {"share_prompts": False, "packing": True}]
NAMES = ["shared", "padded", "packed"]


def train(trainer: TorchTrainer, step: int) -> dict[str, float]:
    values = trainer.train(batch(step, lengths=LENGTHS[step]), Step(step), lambda: False).values
    return {name: values[name] for name in ("loss", "grad_norm")}


def takes_the_same_steps_and_compiles_once(directory: Path, keys: dict[str, Any]) -> None:
    torch._dynamo.reset()
    plain, compiled = TorchTrainer(config(**keys), directory), TorchTrainer(config(compile=True, **keys), directory)
    graphs = list[int]()
    for step in range(4):
        assert train(compiled, step) == pytest.approx(train(plain, step), rel=1e-4, abs=1e-6)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [graphs[0]] * 4
    assert graphs[0] > 0
    assert all("forward" in vars(layer) for layer in compiled.model.model.layers)


@pytest.fixture
def without_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace and transform the layers as for any compiler, and run the result without one, which takes seconds less."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


@pytest.mark.usefixtures("without_machine_code")
@pytest.mark.parametrize("keys", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS[1:])])
def test_traced_layers_take_the_same_steps(model_directory: Path, keys: dict[str, Any]) -> None:
    takes_the_same_steps_and_compiles_once(model_directory, keys)


@pytest.mark.long
@pytest.mark.usefixtures("without_machine_code")
def test_traced_layers_are_recomputed_by_gradient_checkpointing(model_directory: Path) -> None:
    takes_the_same_steps_and_compiles_once(model_directory, {"gradient_checkpointing": True})


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("keys", KINDS, ids=NAMES)
def test_compiled_layers_take_the_same_steps(model_directory: Path, keys: dict[str, Any]) -> None:
    takes_the_same_steps_and_compiles_once(model_directory, keys)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_compiled_layers_train_and_resume_on_ranks(model_directory: Path, tmp_path: Path, backend: str) -> None:
    alone, saved = TorchTrainer(config(), model_directory), tmp_path / "saved"
    expected = [alone.train(batch(step), Step(step), lambda: False).values["loss"] for step in range(4)]
    chosen = config(backend=backend, compile=True)
    straight = ranked(chosen, model_directory, tmp_path / "one", 2, steps=list(range(4)), save=saved, save_after=1)
    assert straight.column("loss") == pytest.approx(expected, rel=1e-4, abs=2e-6)
    assert "trainer.compile has no effect" not in "".join(straight.said)
    resumed = ranked(chosen, model_directory, tmp_path / "two", 2, steps=[2, 3], load=saved)
    assert resumed.column("loss") == pytest.approx(straight.column("loss")[2:], rel=1e-6)


def test_a_model_that_cannot_be_compiled_trains_without(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        raise RuntimeError("no kernel for this operation")

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=fails))
    with caplog.at_level(logging.WARNING):
        compiled = TorchTrainer(config(compile=True), model_directory)
    assert "trainer.compile has no effect on this model: compilation raises BackendCompilerFailed" in caplog.text
    assert train(compiled, 0) == train(TorchTrainer(config(), model_directory), 0)


def test_a_machine_without_compiler_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError) as raised:
        check_compiler(CPU)
    assert str(raised.value) == (
        "trainer.compile is true; it needs a C++ compiler, and no-such-compiler is not on the PATH: install one, or "
        "set CXX to it"
    )
    monkeypatch.setenv("CXX", os.path.realpath("/bin/true"))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": "/nowhere"})
    with pytest.raises(ConfigError, match=r"it needs Python's headers, and /nowhere/Python\.h does not exist"):
        check_compiler(CPU)
