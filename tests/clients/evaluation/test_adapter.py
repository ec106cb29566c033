# pyright: basic, reportMissingImports=false
"""``staleflow eval`` of an adapter."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from staleflow.clients.evaluation.standalone import chosen_sets, run, with_checkpoint
from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config

JUDGES = Path(__file__).parent / "judges.py"


def test_an_adapter_plays_over_the_base_that_it_names_as_their_merged_model_does(
    model_directory: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    load: Any = AutoModelForCausalLM.from_pretrained
    model: Any = get_peft_model(load(model_directory), LoraConfig(r=4, target_modules="all-linear", lora_alpha=64))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "adapter")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(model_directory).save_pretrained(tmp_path / "merged")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1="}\n{"prompt": "12-3="}\n')
    table: dict[str, Any] = {
        "prompts": {"source": "somewhere:prompts"},
        "reward": {"run": f"{JUDGES}:ids_sum"},
        "rollout": {"max_new_tokens": 6, "max_inflight": 4},
        "eval": [{"name": "sums", "path": str(rows), "samples": 4, "temperature": 1.0}],
    }

    def scores(checkpoint: Path) -> list[list[float]]:
        config = with_checkpoint(msgspec.convert(table, Config), checkpoint)
        (result,) = run(config, chosen_sets(config, ()), lambda name, done, total: None)
        return [one.rewards for one in result.scores]

    assert scores(tmp_path / "adapter") == scores(tmp_path / "merged") != scores(model_directory)
    named = tmp_path / "adapter" / "adapter_config.json"
    named.write_text(named.read_text().replace(str(model_directory), str(tmp_path / "gone")))
    with pytest.raises(ConfigError, match=r"base_model_name_or_path of adapter_config.json is .*gone"):
        scores(tmp_path / "adapter")
