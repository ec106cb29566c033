"""A whole run with vLLM as its engine survives the death of a worker in the middle."""

import importlib.util
import json
import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.clients.rollout.engines.vllm.serving import serve
from tests.process.running import END_S, Run, audited

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: make test-vllm runs these tests", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]

SMALL = (
    "rollout.engine=vllm",
    "rollout.workers=1",
    "rollout.vllm.kv_cache_mb=16",
    "model.options.hidden=96",
    "model.options.heads=3",  # a head size of 32, for which vLLM's CPU attention has kernels
    "scheduler.lease_s=5.0",
)


def test_a_killed_worker_takes_its_engine_core_with_it_and_the_run_ends_normally(run_dir: Path) -> None:
    with Run(run_dir, "smoke.toml", *SMALL) as run:
        run.wait_for("consume", 2, END_S)
        engine = [child for worker in run.role("attach", "rollout") for child in worker.children(recursive=True)]
        assert engine, "the engine core is a child of the rollout worker"
        run.kill("attach", "rollout")
        _, alive = psutil.wait_procs(engine, timeout=10)
        assert alive == []
        output = run.finish(END_S)
    assert run.process.returncode == 0, output
    steps = run.summary()["steps"]
    assert (run.summary()["violations"], run.summary()["outcome"]) == (0, "finished")
    assert run.summary()["restarts"] == {"rollout-0": 1}
    audited(run_dir, f"consume={steps}", f"publish={steps + 1}", "pull=2")


def test_weights_from_the_trainer_reach_vllm_too(run_dir: Path) -> None:
    with Run(run_dir, "smoke.toml", *SMALL, "parameters.transport=direct", "trainer.steps=3") as run:
        output = run.finish(END_S)
    assert run.process.returncode == 0, output
    assert (run.summary()["violations"], run.summary()["outcome"]) == (0, "finished")
    log = (run_dir / "logs" / "rollout-0.log").read_text()
    loaded = re.findall(r"version (\d+) of lineage 0 is loaded, from the trainer", log)
    assert any(int(version) > 0 for version in loaded), log  # under load, an engine skips some versions


def test_vllm_and_transformers_generate_for_one_run(run_dir: Path) -> None:
    pools = 'rollout.pool=[{engine="transformers", max_inflight=8}, {max_inflight=16, vllm={kv_cache_mb=8}}]'
    with Run(run_dir, "smoke.toml", *SMALL, pools, "trainer.steps=2000") as run:
        pushed = set[str]()
        while pushed != {"rollout-0", "rollout-1"}:
            run.wait_for("push", run.count("push") + 50, END_S)
            pushed = {str(e["worker"]).partition(".")[0] for e in run.events() if e["ev"] == "push"}
        run.process.send_signal(signal.SIGINT)
        output = run.finish(END_S)
    assert run.process.returncode == 130, output
    assert run.summary()["violations"] == 0
    audited(run_dir, "consume=1", "close=1")
    attached = [(run_dir / "logs" / f"rollout-{number}.log").read_text() for number in range(2)]
    assert "transformers engine, 3 groups" in attached[0]
    assert "vllm engine, 6 groups" in attached[1]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert max(line["mismatch_kl"] for line in lines if "mismatch_kl" in line) < 0.1


def test_a_running_vllm_server_generates_for_a_run(run_dir: Path) -> None:
    from staleflow.examples.quickstart.model import build

    build(run_dir.parent / "model", seed=0, limit=20, hidden=96, layers=2, heads=3, steps=50, batch=64, lr=4e-3)
    made = (f"model.path={run_dir.parent}/model", "model.build=", "model.options={}", "rollout.engine=vllm_server")
    with (
        serve(run_dir.parent / "model", "--kv-cache-memory-bytes", str(16 << 20), "--max-num-seqs", "32") as url,
        Run(run_dir, "smoke.toml", "rollout.workers=1", *made, f"rollout.vllm_server.url={url}") as run,
    ):
        output = run.finish(END_S)
    assert run.process.returncode == 0, output
    steps = run.summary()["steps"]
    assert (run.summary()["violations"], run.summary()["outcome"], run.summary()["restarts"]) == (0, "finished", {})
    audited(run_dir, f"consume={steps}", f"publish={steps + 1}", "pull=2")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert max(line["mismatch_kl"] for line in lines if "mismatch_kl" in line) < 0.1


def test_an_option_that_vllm_does_not_have_is_refused_before_anything_starts(run_dir: Path) -> None:
    with Run(run_dir, "smoke.toml", *SMALL, "rollout.vllm.options.quantisation=fp8") as run:
        output = run.finish(END_S)
    assert run.process.returncode == 2
    assert 'rollout.vllm.options.quantisation is "fp8"' in output
    assert "did you mean quantization" in output
    assert not run_dir.exists()
