# pyright: basic, reportMissingImports=false
"""``model.matmul_precision`` reaches torch in each process that computes in float32."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import torch

from staleflow.clients.rollout.engines.transformers.model import open_transformers
from staleflow.clients.stage.main import open_judge
from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.configs.schema import Config
from tests.clients.trainer.conftest import model_directory

__all__ = ["model_directory"]

Open = Callable[[Config, Path, Path], Any]
OPENED: dict[str, Open] = {
    "trainer": lambda config, model, _: TorchTrainer(config, model),
    "engine": lambda config, model, _: open_transformers(config, model),
    "reference": lambda config, _, run_dir: open_judge(config, run_dir, "reference"),
    "critic": lambda config, _, run_dir: open_judge(config, run_dir, "critic"),
}


@pytest.fixture(autouse=True)
def _precision() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("process", OPENED)
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_each_process_multiplies_in_the_configured_precision(
    model_directory: Path, tmp_path: Path, process: str, precision: Literal["highest", "high"]
) -> None:
    table = {
        "model": {"path": str(model_directory), "matmul_precision": precision},
        "prompts": {"source": "somewhere:prompts"},
        "reward": {"run": "somewhere:reward"},
        "trainer": {"algorithm": {"advantage": "gae", "kl_coef": 0.1}},
    }
    torch.set_float32_matmul_precision("high" if precision == "highest" else "highest")
    opened = OPENED[process](msgspec.convert(table, Config), model_directory, tmp_path)
    assert torch.get_float32_matmul_precision() == precision
    if process == "critic":
        opened.close()
