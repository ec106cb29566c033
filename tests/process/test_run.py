"""A whole run survives the death of any of its processes. Each test starts the real ``staleflow run``."""

import json
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.process.running import END_S, Run, audited

pytestmark = pytest.mark.xdist_group("machine")

LONGER = ("trainer.steps=40", "trainer.checkpoint_every=5", "scheduler.lease_s=3.0")
UNUSED = "/site-packages/scipy/"
"""Libraries of a package that is installed in every environment of these tests, and that no process of a run needs."""


def leases(run: Run, name: str) -> int:
    """Return the number of groups that the worker has reserved, and neither pushed nor released."""
    reserved = set[int]()
    for event in run.events():
        if event["ev"] == "reserve" and str(event["worker"]).startswith(f"{name}."):
            reserved.add(event["lease"])
        elif event["ev"] in ("push", "release"):
            reserved.discard(event["lease"])
    return len(reserved)


def test_the_smoke_run_trains_a_model_end_to_end(run_dir: Path) -> None:
    with Run(run_dir, "smoke.toml") as run:
        run.wait_for("consume", 2, END_S)
        unused = {
            Path(one.path).parts[-2] for process in run.family() for one in process.memory_maps() if UNUSED in one.path
        }
        output = run.finish(END_S)
    assert run.process.returncode == 0, output
    assert unused == set(), "transformers imports these packages for other users than staleflow"
    steps = json.loads((run_dir / "config.json").read_text())["trainer"]["steps"]
    summary = run.summary()
    assert (summary["steps"], summary["violations"], summary["outcome"]) == (steps, 0, "finished")
    assert summary["off_policy_max"] <= summary["max_staleness"]
    assert summary["reward_of"] == "held-out prompts"
    coverage = audited(run_dir, f"consume={steps}", f"publish={steps + 1}", "pull=2", "open=1", "close=1")
    assert coverage["seal"] >= steps
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "loss" in line or "train/loss" in line]
    assert len(trained) == steps
    assert all(line["mismatch_kl"] < 0.5 and line["is_weight/ess"] > 0.1 for line in trained)
    assert (run_dir / "checkpoints" / str(steps) / "model.safetensors").exists()
    shown = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in shown] == sorted([*range(steps), *range(steps)])
    assert any(line["completion"].endswith("<eos>") for line in shown), "special tokens are shown"
    assert all(line["prompt"].endswith("=") and 0 <= line["step"] - line["version"] <= 2 for line in shown)


def test_a_killed_rollout_worker_costs_no_group(run_dir: Path) -> None:
    # fill admission, so that the worker soon has groups again
    with Run(run_dir, "simulated.toml", *LONGER, "coordination.admission=fill") as run:
        run.wait_for("consume", 5, END_S)
        before = run.count("release", why="expired") + run.count("release", why="aborted")
        deadline = time.monotonic() + END_S
        while not leases(run, "rollout-0"):  # on a loaded machine the trainer is slower than the engines
            assert time.monotonic() < deadline
            time.sleep(0.02)
        run.kill("attach", "rollout", "rollout-0")
        output = run.finish(END_S)
    assert run.process.returncode == 0, output
    audited(run_dir, "consume=40")
    released = [e for e in run.events() if e["ev"] == "release" and e["why"] in ("expired", "aborted")]
    assert len(released) > before
    again = {e["group"] for e in run.events() if e["ev"] == "push"}
    assert {e["group"] for e in released[before : before + 3]} <= again, "a lost group was not generated again"
    assert run.summary()["restarts"] == {"rollout-0": 1}


@pytest.mark.parametrize(
    "server", ["scheduler", *(pytest.param(name, marks=pytest.mark.long) for name in ("trajectories", "parameters"))]
)
def test_a_killed_server_comes_back_and_the_run_ends_normally(run_dir: Path, server: str) -> None:
    with Run(run_dir, "simulated.toml", *LONGER) as run:
        run.wait_for("consume", 5, END_S)
        run.kill("serve", server)
        output = run.finish(END_S)
    assert run.process.returncode == 0, output
    audited(run_dir, "consume=40")
    assert run.count("open") == (2 if server == "scheduler" else 1)


def test_a_killed_trainer_gets_the_batch_of_its_checkpoint_again(run_dir: Path) -> None:
    one = ("trainer.checkpoint_every=20", "trainer.simulated_step_s=0.3")  # no checkpoint is new when the kill comes
    with Run(run_dir, "simulated.toml", *LONGER, *one) as run:
        run.wait_for("consume", 22, END_S)
        run.kill("attach", "train")
        output = run.finish(END_S)
    assert run.process.returncode == 0, output
    audited(run_dir, "rollback=1", "join=2")
    events = list(run.events())
    rollback = next(i for i, e in enumerate(events) if e["ev"] == "rollback")
    again = next(e for e in events[rollback:] if e["ev"] == "seal")
    first = next(e for e in events if e["ev"] == "seal" and e["step"] == again["step"])
    assert (again["members"], again["digest"]) == (first["members"], first["digest"])
    assert run.summary()["steps"] == 40


def test_ctrl_c_leaves_no_process_and_resume_goes_on(run_dir: Path) -> None:
    with Run(run_dir, "simulated.toml", *LONGER) as run:
        run.wait_for("consume", 5, END_S)
        family = run.family()
        asked = time.monotonic()
        run.process.send_signal(signal.SIGINT)
        output = run.finish(15)
        assert time.monotonic() - asked < 10
    assert run.process.returncode == 130, output
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)
    done = run.count("consume")
    with Run(run_dir, "simulated.toml", *LONGER, "--resume") as run:
        output = run.finish(END_S)
    assert run.process.returncode == 0, output
    assert done < 40
    assert run.summary()["steps"] == 40
    audited(run_dir, "open=2", "consume=40")


def test_ctrl_c_while_it_starts_leaves_no_process(run_dir: Path) -> None:
    with Run(run_dir, "simulated.toml") as run:
        deadline = time.monotonic() + END_S
        while not run.family():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        family = run.family()
        run.process.send_signal(signal.SIGINT)
        output = run.finish(END_S)
    assert run.process.returncode == 130, output
    # a process that has just started notices the end when its input closes
    _, alive = psutil.wait_procs(family, timeout=120)
    assert alive == []


def test_a_killed_supervisor_takes_its_processes_with_it(run_dir: Path) -> None:
    with Run(run_dir, "simulated.toml", *LONGER) as run:
        run.wait_for("consume", 2, END_S)
        family = run.family()
        run.process.kill()
        _, alive = psutil.wait_procs(family, timeout=120)
    assert alive == []
