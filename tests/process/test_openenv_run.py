"""Whole runs play on servers of OpenEnv, one of which is killed and returns."""

import json
from pathlib import Path

import pytest

from tests.process.running import END_S, Run, audited

pytest.importorskip("websockets")
pytest.importorskip("openenv")

from tests.examples.environments.guessing import serving

pytestmark = pytest.mark.xdist_group("machine")

ENVIRONMENT = "staleflow.examples.environments.openenv_env"


@pytest.mark.slow
def test_the_shipped_environment_is_trained_on_end_to_end(run_dir: Path) -> None:
    with serving("staleflow.examples.environments.openenv_calculator", "--limit", "20") as server:
        url = server.url
        arguments = (
            *(f"prompts.options.base_url={url}", f"environment.options.base_url={url}", "model.options.limit=20"),
            *("model.options.steps=80", "trainer.steps=2", "trainer.eval_every=2", "trainer.eval_prompts=8"),
            "rollout.filter=none",
        )
        with Run(run_dir, "openenv.toml", *arguments) as run:
            output = run.finish(END_S)
    assert run.process.returncode == 0, output
    audited(run_dir, "consume=2", "publish=3", "open=1", "close=1")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "loss" in line]
    assert len(trained) == 2
    assert all(line["mismatch_kl"] < 0.5 and 1 <= line["environment/turns"] <= 3 for line in trained)
    assert all(0 <= line["reward/eval"] <= 1 for line in lines if "reward/eval" in line)
    assert not any("reward/eval_failed" in line for line in lines)


def test_a_server_that_is_killed_costs_its_groups_and_not_the_run(run_dir: Path) -> None:
    with serving() as server:
        arguments = (
            *(f"prompts.source={ENVIRONMENT}:prompts", f"prompts.options.base_url={server.url}"),
            *(f"environment.run={ENVIRONMENT}:OpenEnv", f"environment.options.base_url={server.url}"),
            *("environment.options.session_timeout_s=120.0", 'reward.run=""', "trainer.steps=12"),
        )
        with Run(run_dir, "simulated.toml", *arguments) as run:
            run.wait_for("consume", 4, END_S)
            server.kill()
            server.launch()
            output = run.finish(END_S)
    assert run.process.returncode == 0, output
    assert (run.summary()["steps"], run.summary()["restarts"]) == (12, {})
    audited(run_dir, "consume=12")
    logs = "".join(path.read_text() for path in (run_dir / "logs").glob("rollout-*.log"))
    assert f"the environment raised Unavailable: {server.url}: " in logs


def test_a_wrong_url_is_one_error_and_nothing_trains(run_dir: Path) -> None:
    url = "http://127.0.0.1:1"
    arguments = (f"environment.run={ENVIRONMENT}:OpenEnv", f"environment.options.base_url={url}", 'reward.run=""')
    with Run(run_dir, "simulated.toml", *arguments) as run:
        output = run.finish(END_S)
    assert run.process.returncode == 2, output
    assert f"environment.options.base_url: {url}: /schema: " in output
    assert run.count("consume") == 0
