"""A whole run trains an adapter: its versions are the adapter, and a resumed run and an evaluation start from it."""

import json
from pathlib import Path
from typing import Any

import pytest

from staleflow.cli.main import main
from tests.process.running import END_S, ROOT, Run, audited

pytestmark = pytest.mark.xdist_group("machine")

REWARD = ROOT / "tests" / "clients" / "evaluation" / "judges.py"
SMALL = (
    f"reward.run={REWARD}:ids_sum",  # an untrained model gets different rewards
    *("model.lora.rank=2", "model.options.steps=1", "rollout.workers=1", "rollout.filter=none"),
    *("trainer.batch_size=2", "trainer.lr=1e-2", "trainer.eval_prompts=4", "trainer.algorithm.kl_coef=0.01"),
    *("trainer.checkpoint_every=1", "parameters.keep_versions=9"),
)


def trained(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


@pytest.mark.slow
def test_an_adapter_is_trained_published_resumed_and_evaluated(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Run(run_dir, "smoke.toml", *SMALL, "trainer.steps=2", "parameters.store=disk") as run:
        output = run.finish(END_S)
    assert run.process.returncode == 0, output
    first, second = trained(run_dir)
    assert first["mismatch_kl"] < 1e-9, "trainer and engine compute the same function of base and adapter"
    assert abs(first["kl/reference"]) < 1e-9, (
        "the reference model is the base, and version 0 of the adapter has no effect"
    )
    assert abs(second["kl/reference"]) > abs(first["kl/reference"])

    whole = (run_dir / "model" / "model.safetensors").stat().st_size
    versions = [path.stat().st_size for path in (run_dir / "parameters").rglob("*-*.bin")]
    assert len(versions) == 3
    assert len(set(versions)) == 1
    assert versions[0] < whole / 5, "a version is the adapter alone"

    with Run(run_dir, str(run_dir / "config.toml"), "--resume", "trainer.steps=3") as run:
        output = run.finish(END_S)
    assert run.process.returncode == 0, output
    assert (run.summary()["steps"], run.summary()["violations"], run.summary()["outcome"]) == (3, 0, "finished")
    audited(run_dir, "consume=3", "publish=4", "open=2", "close=2")
    checkpoint = run_dir / "checkpoints" / "3"
    assert {path.name for path in checkpoint.iterdir()} >= {"adapter_model.safetensors", "adapter_config.json"}
    assert not (checkpoint / "model.safetensors").exists()

    assert main(["eval", str(checkpoint), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompts"] == 4
