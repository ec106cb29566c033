# pyright: basic, reportMissingImports=false
"""A checkpoint resumes on another number of ranks and under another backend, with every number of its optimizer."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from staleflow.clients.models import optimizer_files
from staleflow.clients.models.optimizer_files import FOLDER, read_optimizer
from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import Step
from tests.clients.trainer.backends.test_backends import settings
from tests.clients.trainer.making import batch
from tests.clients.trainer.ranked import ranked

pytestmark = pytest.mark.slow

BEFORE, AFTER = [0, 1, 2], [3, 4, 5]


def in_dtype(dtype: str, backend: str) -> Config:
    table = msgspec.to_builtins(settings(backend))
    table["model"]["dtype"] = dtype
    return msgspec.convert(table, Config)


def stored(checkpoint: Path) -> dict[str, Tensor]:
    """Return every tensor of the optimizer's files, whole."""
    sizes: Any = HuggingFaceStorageReader(str(checkpoint / FOLDER)).read_metadata().state_dict_metadata
    return read_optimizer(checkpoint, lambda name: torch.full(sizes[name].size, torch.nan))


def going_on() -> bool:
    return False


def alone(chosen: Config, directory: Path, steps: list[int], load: Path | None = None) -> tuple[TorchTrainer, Any]:
    """Train without other ranks; return the trainer and the values of each step."""
    trainer = TorchTrainer(chosen, directory)
    if load is not None:
        trainer.check(load)
        trainer.load(load)
    return trainer, [trainer.train(batch(step), Step(step), going_on).values for step in steps]


def moved(chosen: Config, nproc: int, directory: Path, tmp_path: Path, saved: Path) -> tuple[list[Any], Any, Path]:
    """Resume from a checkpoint; return the values of the next steps, the weights, and the same checkpoint again."""
    again = tmp_path / "again"
    if chosen.trainer.backend == "torch":
        again.mkdir()
        alone(chosen, directory, [], saved)[0].save(again)
        trainer, values = alone(chosen, directory, AFTER, saved)
        return values, {name: array.copy() for name, array in trainer.weights().items()}, again
    done = ranked(
        chosen, directory, tmp_path / "moved", nproc, steps=AFTER, groups=3, load=saved, save=again, save_after=-1
    )
    return done.results, done.weights, again


def long(*case: object) -> Any:
    return pytest.param(*case, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("dtype", "source", "target"),
    [
        ("bfloat16", ("fsdp", 2), ("torch", 1)),
        ("float32", ("torch", 1), ("fsdp", 2)),
        long("float32", ("torch", 1), ("fsdp", 3)),
        long("float32", ("fsdp", 2), ("torch", 1)),
        long("bfloat16", ("torch", 1), ("fsdp", 2)),
        long("float32", ("fsdp", 3), ("fsdp", 2)),
        long("bfloat16", ("fsdp", 2), ("ddp", 2)),
        long("float32", ("ddp", 2), ("fsdp", 1)),
        long("float32", ("ddp", 2), ("torch", 1)),
        long("float32", ("torch", 1), ("ddp", 3)),
    ],
)
def test_a_run_continues_on_other_ranks_and_another_backend_from_the_same_optimizer_state(
    model_directory: Path, tmp_path: Path, dtype: str, source: tuple[str, int], target: tuple[str, int]
) -> None:
    (backend, nproc), (other, ranks), saved = source, target, tmp_path / "saved"
    chosen = in_dtype(dtype, backend)
    if backend == "torch":
        saved.mkdir()
        alone(chosen, model_directory, BEFORE)[0].save(saved)
    else:
        first = ranked(chosen, model_directory, tmp_path / "1", nproc, steps=BEFORE, save=saved, save_after=BEFORE[-1])
        if backend == "fsdp":
            first.check_spans()
    trainer, straight = alone(in_dtype(dtype, "torch"), model_directory, [*BEFORE, *AFTER])
    values, weights, again = moved(in_dtype(dtype, other), ranks, model_directory, tmp_path, saved)
    tolerance: Any = {"rel": 1e-4, "abs": 2e-6} if dtype == "float32" else {"rel": 0.05, "abs": 2e-3}
    for name in ("loss", "grad_norm", "lr"):
        expected = [value[name] for value in straight[len(BEFORE) :]]
        assert [value[name] for value in values] == pytest.approx(expected, **tolerance), name
    if dtype == "float32":
        for name, array in trainer.weights().items():
            assert np.allclose(weights[name], array, atol=2e-5), name
    before, after = stored(saved), stored(again)
    assert {name.split("/")[0] for name in before} == ({"adam"} if dtype == "float32" else {"adam", "master"})
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


def test_the_state_is_split_into_files_of_bounded_size_and_read_back(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_files, "FILE_BYTES", 10_000)
    trainer, _ = alone(settings(), model_directory, BEFORE)
    trainer.save(tmp_path)
    files = sorted((tmp_path / FOLDER).iterdir())
    assert len(files) > 2
    largest = max(tensor.nbytes for tensor in trainer.learner.optimizer.tensors().values())  # type: ignore[attr-defined]
    assert max(path.stat().st_size for path in files) < max(10_000, largest) + 10_000
    resumed, values = alone(settings(), model_directory, AFTER, tmp_path)
    assert values == [trainer.train(batch(step), Step(step), going_on).values for step in AFTER]
    own = dict(resumed.weights().items())
    assert all(np.array_equal(array, own[name]) for name, array in trainer.weights().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"adam/other/exp_avg": torch.zeros(2)}, "tensor adam/other/exp_avg belongs to no parameter"),
        ({"adam/model.norm.weight/exp_avg": torch.zeros(3)}, "Size mismatch between saved torch.Size"),
    ],
)
def test_state_of_another_model_is_refused_in_one_line(
    model_directory: Path, tmp_path: Path, change: dict[str, Tensor], message: str
) -> None:
    trainer, _ = alone(settings(), model_directory, [])
    trainer.save(tmp_path)
    optimizer_files.optimizer_files(optimizer_files.whole(change), trainer._ranks.place)[0].write(tmp_path)
    with pytest.raises(ConfigError, match=message) as refused:
        trainer.load(tmp_path)
    assert "\n" not in str(refused.value)
