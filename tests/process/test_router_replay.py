# pyright: basic, reportMissingImports=false
# mypy: disable-error-code="no-untyped-call"
"""A whole run of a mixture of experts trains with the experts that its engines recorded."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from staleflow.examples.quickstart.model import EOS_ID, PAD_ID, character_tokenizer
from tests.process.running import END_S, ROOT, Run, audited

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("machine")]

STEPS = 3
CONFIG = f"""
[model]
path = "model"
[prompts]
source = "staleflow.examples.quickstart.task:prompts"
options = {{ limit = 20 }}
[reward]
run = "{ROOT}/tests/clients/evaluation/judges.py:ids_sum"
[rollout]
workers = 1
group_size = 4
max_inflight = 16
max_new_tokens = 8
filter = "none"
[trainer]
router_replay = true
steps = {STEPS}
batch_size = 2
lr = 3e-2
eval_prompts = 0
"""
"""An untrained model gets rewards that differ, and this learning rate changes the choices within a step."""
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}


def test_a_run_replays_the_experts_of_its_engines(run_dir: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokenizer = character_tokenizer()
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, vocab_size=len(tokenizer)))
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    file = tmp_path / "run.toml"
    file.write_text(CONFIG)
    with Run(run_dir, str(file)) as run:
        output = run.finish(END_S)
    assert run.process.returncode == 0, output
    audited(run_dir, f"consume={STEPS}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    first, *later = [line for line in lines if "loss" in line]
    assert len(later) == STEPS - 1
    assert first["router/replay_changed"] < 0.01, "engine and trainer have the same float32 weights"
    assert first["mismatch_kl"] < 1e-6
    assert max(line["router/replay_changed"] for line in later) > 0.01, "stale groups keep the choices of their weights"
