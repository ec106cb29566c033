"""The shipped configurations of real models fit one GPU of 80 GB, and docs/engines.md has their plans."""

import json
from pathlib import Path
from typing import Any

import pytest

from staleflow.configs.loading.load import load
from staleflow.supervisor.memory.ask import plan_of
from staleflow.supervisor.memory.text import gib

ROOT = Path(__file__).parent.parent.parent.parent
GPU_BYTES = 79 << 30
"""Free memory of an H100 of 80 GB."""
NAMES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "tie_word_embeddings"),
)
SHAPES: dict[str, tuple[int, ...]] = {
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2, 151_936, True),
    "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, 151_936, True),
    "qwen2.5-7b-lora": (3584, 18_944, 28, 28, 4, 152_064, False),
}
PARAMETERS = {"qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-7b-lora": 7_615_616_512}
"""Those that the models' cards state, without an adapter."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name == "qwen2.5-0.5b" else pytest.param(name, marks=pytest.mark.long) for name in SHAPES]
)
def test_a_real_model_fits_one_gpu_as_the_page_shows(name: str, tmp_path: Path) -> None:
    shape: dict[str, Any] = dict(zip(NAMES, SHAPES[name], strict=True))
    shape |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32_768}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = load(ROOT / "configs" / "gpu" / f"{name}.toml", [])
    plan = plan_of(config, tmp_path, 1, gpu_bytes=GPU_BYTES)
    assert plan.unknown == []
    assert plan.measured.parameters - (plan.measured.trained if config.model.lora.rank else 0) == PARAMETERS[name]
    (device,) = [device for device in plan.devices if device.gpu == 0]  # the host may store versions of the weights
    assert device.fits
    trainer, engine = device.uses
    cells = [trainer.weights, trainer.gradients, trainer.optimizer, trainer.activations, trainer.logits, trainer.total]
    cells += [engine.weights, engine.kv_cache, device.needed]
    page = (ROOT / "docs" / "engines.md").read_text().splitlines()
    (row,) = [line for line in page if line.startswith(f"| `{name}.toml`")]
    assert [cell.strip() for cell in row.split("|")[2:-1]] == [gib(nbytes) for nbytes in cells]
