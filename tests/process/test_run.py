"""A whole run survives the death of any of its processes. Each test starts the real ``staleflow run``."""

import contextlib
import json
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.process.running import END_S, Run, audited

pytestmark = pytest.mark.xdist_group("machine")

LONGER = ("trainer.steps=100000", "trainer.checkpoint_every=5", "scheduler.lease_s=3.0")
"""More steps than a test has time for: the test ends the run."""
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


def lost_groups(run: Run) -> list[int]:
    """Return the groups that were released without a push, in order."""
    return [e["group"] for e in run.events() if e["ev"] == "release" and e["why"] in ("expired", "aborted")]


def newest_checkpoint(run_dir: Path) -> int:
    return max(int(path.name) for path in (run_dir / "checkpoints").iterdir() if path.name.isdecimal())


def pushed(run: Run) -> set[int]:
    return {e["group"] for e in run.events() if e["ev"] == "push"}


def test_the_smoke_run_trains_a_model_end_to_end(run_dir: Path) -> None:
    with Run(run_dir, "smoke.toml") as run:
        run.wait_for("consume", 2, END_S)
        unused = set[str]()
        for process in run.family():
            with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended meanwhile
                unused |= {Path(one.path).parts[-2] for one in process.memory_maps() if UNUSED in one.path}
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
        before = len(lost_groups(run))
        deadline = time.monotonic() + END_S
        victim = run.role("attach", "rollout", "rollout-0")[0]
        victim.suspend()  # it pushes nothing between the look and the kill
        while not leases(run, "rollout-0"):  # on a loaded machine the trainer is slower than the engines
            victim.resume()
            assert run.process.poll() is None, run.finish(5)
            assert time.monotonic() < deadline
            time.sleep(0.02)
            victim.suspend()
        victim.kill()
        run.wait_for_second("rollout-0")
        while not (lost := lost_groups(run)[before : before + 3]) or not set(lost) <= pushed(run):
            assert run.process.poll() is None, run.finish(5)
            assert time.monotonic() < deadline, f"a lost group was not generated again: {lost}"
            time.sleep(0.05)
        run.drain()
        output = run.finish(END_S)
    assert run.process.returncode == 0, output
    audited(run_dir, f"consume={run.summary()['steps']}")
    assert run.summary()["restarts"] == {"rollout-0": 1}


@pytest.mark.parametrize(
    "server", ["scheduler", *(pytest.param(name, marks=pytest.mark.long) for name in ("trajectories", "parameters"))]
)
def test_a_killed_server_comes_back_and_the_run_ends_normally(run_dir: Path, server: str) -> None:
    with Run(run_dir, "simulated.toml", *LONGER) as run:
        run.wait_for("consume", 5, END_S)
        run.kill("serve", server)
        run.wait_for("consume", run.count("consume") + 10, END_S)  # more steps than were under way
        run.drain()
        output = run.finish(END_S)
    assert run.process.returncode == 0, output
    audited(run_dir, f"consume={run.summary()['steps']}")
    assert list(run.summary()["restarts"].values()) == [1]
    assert run.count("open") == (2 if server == "scheduler" else 1)


def test_a_killed_trainer_gets_the_batch_of_its_checkpoint_again(run_dir: Path) -> None:
    with Run(run_dir, "simulated.toml", *LONGER, "trainer.simulated_step_s=0.3") as run:
        run.wait_for("checkpoint", 1, END_S)
        victim = run.role("attach", "train")[0]
        victim.suspend()  # it saves nothing between the look and the kill
        while [e["step"] for e in run.events() if e["ev"] == "consume"][-1] < newest_checkpoint(run_dir):
            victim.resume()
            time.sleep(0.05)
            assert run.process.poll() is None, run.finish(5)
            victim.suspend()
        victim.kill()
        run.wait_for("join", 2, END_S)
        run.wait_for("consume", run.count("consume") + 2, END_S)
        run.drain()
        output = run.finish(END_S)
    assert run.process.returncode == 0, output
    audited(run_dir, "rollback=1", "join=2")
    events = list(run.events())
    rollback = next(i for i, e in enumerate(events) if e["ev"] == "rollback")
    assert events[rollback]["to_version"] > 0
    again = next(e for e in events[rollback:] if e["ev"] == "seal")
    first = next(e for e in events if e["ev"] == "seal" and e["step"] == again["step"])
    assert (again["members"], again["digest"]) == (first["members"], first["digest"])


def test_ctrl_c_leaves_no_process_and_resume_goes_on(run_dir: Path) -> None:
    with Run(run_dir, "simulated.toml", *LONGER) as run:
        run.wait_for("consume", 5, END_S)
        family = run.family()
        run.process.send_signal(signal.SIGINT)
        output = run.finish(120)
    assert run.process.returncode == 130, output
    assert psutil.wait_procs(family, timeout=120)[1] == []
    steps = run.summary()["steps"] + 9
    with Run(run_dir, "simulated.toml", *LONGER, f"trainer.steps={steps}", "--resume") as run:
        output = run.finish(END_S)
    assert run.process.returncode == 0, output
    assert run.summary()["steps"] == steps
    audited(run_dir, "open=2", f"consume={steps}")


def test_ctrl_c_while_it_starts_leaves_no_process(run_dir: Path) -> None:
    with Run(run_dir, "simulated.toml", *LONGER) as run:
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
