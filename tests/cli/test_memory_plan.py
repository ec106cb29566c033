"""``plan --memory``, ``doctor --config`` and the start of a run print the memory plan of a model directory."""

import json
from pathlib import Path
from typing import Any

import pytest

from staleflow.cli.run import print_memory
from staleflow.configs.loading.load import load
from staleflow.supervisor import checkup
from staleflow.supervisor.memory import ask
from tests.cli.conftest import ROOT, SIMULATED, Cli

ONE_GPU = ROOT / "configs" / "gpu" / "one-gpu.toml"
SHAPE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    """The overrides for a model directory without weights."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return ["model.build=", "model.options={}", f"model.path={tmp_path}"]


def test_a_plan_for_another_machine_needs_no_weights_and_names_what_does_not_fit(
    cli: Cli, overrides: list[str]
) -> None:
    tight = [*overrides, "rollout.engine=vllm", "rollout.vllm.gpu_memory_utilization=0.9"]
    said = cli("plan", ONE_GPU, *tight, "--memory", "--gpus", 1, "--gpu-gib", 4, timeout_s=200)
    assert said.code == 1, said.err
    first, *rest = said.out.splitlines()
    assert first.startswith("GPU 0: about ")
    assert first.endswith(" of 4.0 GiB free: does not fit; lower rollout.vllm.gpu_memory_utilization")
    assert [line.split()[0] for line in rest[:2]] == ["trainer", "rollout-0"]
    assert rest[2].startswith("main memory: about <0.1 of ")
    assert rest[3].split()[0] == "parameters"
    assert rest[4].startswith("estimated for prompts of 127 tokens")  # the model's context leaves room for one more


def test_doctor_and_a_run_print_the_plan_of_this_machine(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load(ONE_GPU, overrides)
    *devices, assumed = checkup.memory(config, 0)
    assert [finding.what for finding in devices] == ["memory, main memory"]
    assert "trainer " in devices[0].found
    assert assumed.found.startswith("estimated for prompts of 127 tokens")

    print_memory(config, tmp_path / "run", 0)
    assert capsys.readouterr().err == ""  # a plan takes longer than loading this model
    monkeypatch.setattr(ask, "LARGE_MODEL_BYTES", 0)
    print_memory(config, tmp_path / "run", 0)
    assert "main memory: about " in capsys.readouterr().err


def test_a_model_that_the_run_has_yet_to_build_has_no_plan_before(cli: Cli) -> None:
    (found,) = checkup.memory(load(ONE_GPU, []), 0)
    assert found.found == "no plan before the run has built its model: staleflow plan RUN_DIR --memory"
    said = cli("plan", ONE_GPU, "--memory")
    assert (said.code, said.out) == (2, "")
    assert "the run has yet to build its model" in said.err
    assert list(checkup.memory(load(SIMULATED, []), 0)) == []


def test_a_directory_that_is_no_model_is_named(tmp_path: Path, overrides: list[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "none such"}))
    (found,) = checkup.memory(load(ONE_GPU, overrides), 0)
    assert found.state == "missing"
    assert str(tmp_path) in found.found
    (tmp_path / "config.json").unlink()
    (found,) = checkup.memory(load(ONE_GPU, overrides), 0)
    assert "a memory plan needs the config.json of the model in it" in found.found


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--gpus", 1], "it applies to the memory plan"),
        (["--memory", "--etas", "1"], "it applies to the search"),
        (["--memory", "--graph"], "leave it out"),
    ],
)
def test_options_of_another_plan_are_refused(cli: Cli, words: list[Any], text: str) -> None:
    said = cli("plan", SIMULATED, *words)
    assert said.code == 2
    assert text in said.err
