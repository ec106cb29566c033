# pyright: basic, reportMissingImports=false
"""A step that does not fit reports its cause, and saves every state that is still intact."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from staleflow.clients.out_of_memory import out_of_memory
from staleflow.clients.trainer.backends.base import OutOfMemory
from staleflow.clients.trainer.backends.collectives import ManyRanks
from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.configs.ranks import Place
from staleflow.protocols.consistency.ids import Step
from tests.clients.trainer.making import batch, config
from tests.clients.trainer.test_torch_trainer import going_on, optimizer, trained


def test_what_torch_says_when_this_machine_has_too_little_memory_is_recognised() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert out_of_memory(error.value)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other call", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_of_the_errors_of_a_device_those_of_too_little_memory_are_recognised(text: str, *, meant: bool) -> None:
    assert out_of_memory(RuntimeError(text)) == meant


def test_running_out_of_memory_names_step_batch_and_what_to_change(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = TorchTrainer(config(), model_directory)

    def too_much(**_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(trainer.learner, "forward", too_much)
    with pytest.raises(OutOfMemory) as error:
        trainer.train(batch(3), Step(3), going_on)
    assert str(error.value) == (
        "step 3: out of memory; batch 4 of 12 trajectories is kept. A run's configuration is fixed: start a new one "
        "with trainer.micro_tokens below 16384 or trainer.gradient_checkpointing, and model.path at the newest "
        "checkpoint if there is one; its optimizer starts afresh (CUDA out of memory. Tried to allocate 2.00 GiB)"
    )


def test_what_is_saved_when_memory_ran_out_in_a_step_is_the_version_before_it(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second pass of step 1 does not fit: the checkpoint excludes the first pass's gradient. The trainer releases
    that gradient and the memory of the second pass."""
    settings = config(micro_tokens=20)
    trainer, clean = TorchTrainer(settings, model_directory), TorchTrainer(settings, model_directory)
    for one in (trainer, clean):
        trained(one, 0)
    forward, held = trainer.learner.forward, list[weakref.ref[torch.Tensor]]()

    def fails_then(**inputs: Any) -> Any:
        activations = torch.zeros(9)
        held.append(weakref.ref(activations))
        if len(held) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(**inputs)

    monkeypatch.setattr(trainer.learner, "forward", fails_then)
    with pytest.raises(OutOfMemory) as error:
        trainer.train(batch(1), Step(1), going_on)
    assert error.value.can_save
    assert len(held) == 2
    assert held[1]() is None
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    for one, name in ((trainer, "after"), (clean, "clean")):
        (tmp_path / name).mkdir()
        one.save(tmp_path / name)
    files = {path.name: path.read_bytes() for path in (tmp_path / "clean").iterdir()}
    assert "model.safetensors" in files
    assert {path.name: path.read_bytes() for path in (tmp_path / "after").iterdir()} == files


def test_an_optimizer_that_does_not_fit_names_what_would_and_saves_nothing(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step of the optimizer allocates the moments parameter by parameter: some weights have moved when it
    fails."""
    trainer = TorchTrainer(config(), model_directory)

    def too_much() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(optimizer(trainer)._adam, "step", too_much)
    with pytest.raises(OutOfMemory) as error:
        trainer.train(batch(0), Step(0), going_on)
    assert not error.value.can_save
    assert str(error.value) == (
        "step 0: out of memory in the optimizer; batch 1 of 12 trajectories is kept. A run's configuration is fixed: "
        'start a new one with trainer.backend "fsdp" or "deepspeed" over more ranks (trainer.nproc), and model.path at '
        "the newest checkpoint if there is one; its optimizer starts afresh (CUDA out of memory. Tried to allocate 2.00"
        " GiB)"
    )


def test_where_ranks_wait_for_each_other_nothing_is_saved_when_memory_ran_out_in_a_pass(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_much(**_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    ranks = ManyRanks(Place())
    try:
        trainer = TorchTrainer(config(backend="ddp"), model_directory, None, ranks)
        monkeypatch.setattr(trainer.learner, "forward", too_much)
        with pytest.raises(OutOfMemory) as error:
            trainer.train(batch(3), Step(3), going_on)
        assert not error.value.can_save
    finally:
        ranks.close()
