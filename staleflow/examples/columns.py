"""Typed columns from an engine of your own to a training loop of your own, with real servers on this machine.

``python staleflow/examples/columns.py [RUN_DIR]`` runs two steps. The engine draws random tokens; each token has a
matrix of routed experts and a log-probability of a teacher, each sample an image as bytes.
"""

import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

import staleflow
from staleflow.protocols.consistency.ids import Lineage, Version

CONFIG = """
name = "columns"
[prompts]
source = "staleflow.examples.quickstart.task:prompts"
[reward]
run = "staleflow.examples.quickstart.task:reward"
[rollout]
engine = "none:Own"     # the engine of this file attaches by itself, and no other one is started
group_size = 4
max_new_tokens = 8
filter = "none"
[trainer]
backend = "simulated"   # likewise
steps = 2
batch_size = 2
[[column]]
name = "routed_experts"
per = "token"
dtype = "int32"
shape = [4, 2]
[[column]]
name = "teacher_logp"
per = "token"
dtype = "float32"
[[column]]
name = "image"
per = "sample"
dtype = "bytes"
max_bytes = 65536
"""
WEIGHTS = {"weight": np.zeros(4, np.float32)}


def sample(random: np.random.Generator) -> staleflow.Sample:
    tokens = int(random.integers(1, 9))
    return staleflow.Sample(
        token_ids=random.integers(0, 100, tokens),
        logprobs=np.full(tokens, -4.6),
        columns={
            "routed_experts": random.integers(0, 64, (tokens, 4, 2), dtype=np.int32),
            "teacher_logp": np.full(tokens, -2.3, np.float32),
            "image": random.bytes(16),
        },
    )


def generate(run_dir: Path) -> None:
    random = np.random.default_rng(0)
    with staleflow.RolloutClient(run_dir, lambda _: None, name="own") as client:
        for lease in client.leases():
            client.push(lease, [1, 2, 3], [sample(random) for _ in range(lease.group_size)])


def train(trainer: staleflow.TrainerClient) -> None:
    if trainer.join(Lineage(0), Version(0)).version < 0:
        trainer.publish_initial(WEIGHTS)
    for batch in trainer.batches(2):
        at = batch.loss_mask
        ahead = (batch.behavior_logprobs - batch.token_columns["teacher_logp"])[at].mean()
        experts, images = batch.token_columns["routed_experts"], batch.sample_columns["image"]
        print(f"step {batch.step}: experts {experts.shape}, {len(images)} images, log-ratio to the teacher {ahead:.2f}")
        trainer.commit(WEIGHTS)
    trainer.finished()


def main(run_dir: Path) -> None:
    config = run_dir.parent / "columns.toml"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "staleflow.cli"]
    scheduler = ["serve", "scheduler", "--config", str(config)]
    roles = (scheduler, ["serve", "trajectories"], ["serve", "parameters"], ["attach", "stage"])
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for role in roles:
            processes.append(subprocess.Popen([*command, *role, "--run-dir", str(run_dir)]))
            while not (run_dir / "sock" / "scheduler").exists():
                if processes[0].poll() is not None:
                    raise SystemExit("the scheduler did not start")
                time.sleep(0.1)
        with staleflow.connect(run_dir) as run, run.trainer() as trainer:
            engine = threading.Thread(target=generate, args=(run_dir,))
            engine.start()
            train(trainer)
            engine.join()
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


if __name__ == "__main__":
    if sys.argv[1:]:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory(prefix="sf-") as folder:
            main(Path(folder) / "run")
