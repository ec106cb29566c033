# pyright: basic, reportMissingImports=false
"""A step that does not fit reports its cause, and saves every state that is still intact."""

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from staleflow.clients.out_of_memory import out_of_memory
from staleflow.clients.trainer.backends.base import OutOfMemory
from staleflow.clients.trainer.backends.collectives import ManyRanks
from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.configs.ranks import Place
from staleflow.protocols.consistency.ids import Step
from tests.clients.trainer.making import batch, config
from tests.clients.trainer.ranked import ranked
from tests.clients.trainer.test_torch_trainer import copied, going_on, optimizer, same, trained
from tests.clients.trainer.test_updates import state


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
        "with trainer.micro_tokens below 8192 or trainer.gradient_checkpointing, and model.path at the newest "
        "checkpoint if there is one; its optimizer starts afresh (CUDA out of memory. Tried to allocate 2.00 GiB)"
    )


def test_what_is_saved_when_memory_ran_out_in_a_step_is_the_version_before_it(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second pass of step 1 on, none fits: the checkpoint excludes the first pass's gradient. The trainer
    releases that gradient and the memory of the second pass."""
    settings = config(micro_tokens=20)
    trainer, clean = TorchTrainer(settings, model_directory), TorchTrainer(settings, model_directory)
    for one in (trainer, clean):
        trained(one, 0)
    forward, held = trainer.learner.forward, list[weakref.ref[torch.Tensor]]()

    def fails_then(**inputs: Any) -> Any:
        activations = torch.zeros(9)
        held.append(weakref.ref(activations))
        if len(held) >= 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(**inputs)

    monkeypatch.setattr(trainer.learner, "forward", fails_then)
    with pytest.raises(OutOfMemory) as error:
        trainer.train(batch(1), Step(1), going_on)
    assert error.value.can_save
    assert len(held) == 3  # the second attempt ends with its first pass
    assert held[1]() is None
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    for one, name in ((trainer, "after"), (clean, "clean")):
        (tmp_path / name).mkdir()
        one.save(tmp_path / name)
    files = contents(tmp_path / "clean")
    assert {Path("model.safetensors"), Path("optimizer/rank-0-file-0.safetensors")} < files.keys()
    assert contents(tmp_path / "after") == files


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fail_once(trainer: TorchTrainer, monkeypatch: pytest.MonkeyPatch, call: int) -> list[int]:
    """Let one pass run out of memory; return the list that receives the tokens of each pass that fitted."""
    forward, tokens, calls = trainer.learner.forward, list[int](), iter(range(1, 999))

    def fails(**inputs: Any) -> Any:
        if next(calls) == call:
            raise torch.OutOfMemoryError("CUDA out of memory")
        tokens.append(inputs["input_ids"].numel())
        return forward(**inputs)

    monkeypatch.setattr(trainer.learner, "forward", fails)
    return tokens


@pytest.mark.parametrize(
    ("keys", "call"),
    [({}, 1), ({}, 2), ({"epochs": 2, "minibatches": 2}, 1), ({"epochs": 2, "minibatches": 2}, 5)],
)
def test_a_step_with_a_pass_that_does_not_fit_is_the_one_with_half_the_tokens_a_pass(
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    keys: dict[str, int],
    call: int,
) -> None:
    """Padded passes have 40 tokens, then 20. With several updates, call 5 is a pass of the first one."""
    first, halves = (
        TorchTrainer(config(micro_tokens=size, share_prompts=False, **keys), model_directory) for size in (40, 20)
    )
    tokens = fail_once(first, monkeypatch, call)
    for step in (0, 1):
        results = [one.train(batch(step), Step(step), going_on) for one in (first, halves)]
        assert results[0] == results[1]
        assert same(state(first), state(halves))
    assert max(tokens[: call - 1], default=40) > 20 >= max(tokens[call - 1 :])
    own = [record for record in caplog.records if record.name == TorchTrainer.__module__]
    (warning,) = [record.getMessage() for record in own if record.levelname == "WARNING"]
    assert warning == (
        "step 0: out of memory in a pass; it starts again, and the run continues, with trainer.micro_tokens 20 instead "
        "of 40 (CUDA out of memory)"
    )


def test_the_gradient_of_halved_passes_is_that_of_whole_ones(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, clean = (TorchTrainer(config(micro_tokens=40), model_directory) for _ in range(2))
    fail_once(one, monkeypatch, 2)
    halved, whole = trained(one, 0), trained(clean, 0)
    assert halved == pytest.approx(whole, rel=1e-4, abs=1e-6)
    for name, array in copied(one).items():
        np.testing.assert_allclose(array, copied(clean)[name], rtol=1e-4, atol=1e-6)


def test_a_part_of_a_streamed_step_that_does_not_fit_ends_the_run(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = TorchTrainer(config(), model_directory)
    trainer.begin()
    fail_once(trainer, monkeypatch, 1)
    with pytest.raises(OutOfMemory, match=r"trainer\.micro_tokens below 16384") as error:
        trainer.add(batch(0), going_on, last=True)
    assert error.value.can_save
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


@pytest.mark.parametrize(("micro", "call"), [(40, 2), (16384, 1)], ids=["some pass", "only pass"])
def test_every_rank_repeats_a_step_of_which_one_rank_has_a_pass_that_does_not_fit(
    model_directory: Path, tmp_path: Path, micro: int, call: int
) -> None:
    """Rank 1 runs out of memory in the backward pass, where rank 0 would wait for it in the last one."""
    both = {"steps": [0, 1], "groups": 4}
    keys = {"backend": "ddp", "nproc": 2, "share_prompts": False}
    failed = ranked(
        config(micro_tokens=micro, **keys), model_directory, tmp_path / "failed", 2, **both, no_room=[1, call]
    )
    clean = ranked(config(micro_tokens=micro // 2, **keys), model_directory, tmp_path / "clean", 2, **both)
    assert failed.column("micro_tokens") == [micro // 2] * 2
    assert failed.column("loss") == clean.column("loss")
    assert same(failed.weights, clean.weights)
    assert sum(text.count("out of memory in a pass; it starts again") for text in failed.said) == 1


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
