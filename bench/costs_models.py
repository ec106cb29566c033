# pyright: basic, reportMissingImports=false, reportPrivateImportUsage=false
# mypy: disable-error-code="no-untyped-call, misc"
"""Costs of engine, trainer, reward worker and checkpoint for ``bench.costs``: the shipped ones on the quickstart's
model, one thread.

Prints one JSON object: the tables of the cost file.
"""

import asyncio
import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from bench.costs_fit import fitted
from bench.trainer_data import SHAPES, batch, groups_of
from bench.trajectories_measure import cpu_seconds, family
from staleflow.clients.rollout.engines.base import Request, Sampling
from staleflow.clients.rollout.engines.transformers.engine import TransformersEngine
from staleflow.clients.stage.reward import reward_stage
from staleflow.clients.stage.worker import StageGroup
from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.configs.schema import Config
from staleflow.configs.schema import Reward as RewardSettings
from staleflow.examples.quickstart.model import build, character_tokenizer
from staleflow.process.host import reuse_memory

GIB = 1 << 30
PROMPT = 7
GROUP = 8
"""Samples of a group."""
REWARDED = 64
"""Groups that are scored."""
ROWS = (8, 32, 128)
TOKENS = 40
SIZES = ((32, (3, 6)), (8, (3, 6)), (8, (24, 40)))
"""Groups of eight, and tokens of a completion, of the batches that are trained."""
STEPS = 4


def engine(model: Any) -> dict[str, float]:
    """Fit the coefficients of a decode step to CPU time, and the prefill to what the first step takes more."""
    rows: list[tuple[float, float, float]] = []
    seconds: list[float] = []
    prefill: list[float] = []
    for count in (ROWS[0], *ROWS):  # the first warms up
        serving = TransformersEngine(model, [], slots=count)
        for id in range(count):
            ids = np.full(PROMPT, 3 + id // GROUP % 8, np.int32)  # the samples of a group share its prompt
            sampling = Sampling(max_new_tokens=TOKENS)
            serving.submit(Request(id=id, prompt_ids=ids, sampling=sampling, seed=id))
        times: list[float] = []
        while serving.stats().running or serving.stats().waiting:
            started = time.process_time()
            serving.step()
            times.append(time.process_time() - started)
        decode = times[1:-1]
        rows += [(float(count * (PROMPT + at + 1)), float(count), 1.0) for at in range(len(decode))]
        seconds += decode
        prefill.append(max(times[0] - decode[0], 0.0) / (count * PROMPT))
    skip = len(seconds) // (len(ROWS) + 1)
    k1, k3, k4 = fitted(rows[skip:], seconds[skip:])
    return {"prefill_s": float(np.median(prefill[1:])), "k1": k1, "k3": k3, "k4": k4}


def trainer(directory: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Fit the step to batches of several sizes, and measure a checkpoint of the same model."""
    table = {"prompts": {"source": "m:p"}, "reward": {"run": "m:r"}, "rollout": {"max_new_tokens": 40, "group_size": 8}}
    backend = TorchTrainer(
        msgspec.convert({**table, "trainer": {"micro_tokens": 16_384, "threads": 1}}, Config), directory
    )
    rows: list[tuple[float, float, float]] = []
    seconds: list[float] = []
    for groups, completion in SIZES:
        shape = replace(SHAPES["quickstart"], groups=groups, completion=completion)
        times: list[float] = []
        for step in range(STEPS):
            data = batch(shape, step, backend.limits.vocabulary)
            started = time.process_time()
            result = backend.train(data, data.step, lambda: False)
            times.append(time.process_time() - started)
            assert not result.bad, result.bad
        rows.append((1.0, float(data.sequence_lengths.sum()), 8.0 * groups))
        seconds.append(float(np.median(times[1:])))
    fixed_s, token_s, trajectory_s = fitted(rows, seconds)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        backend.save(Path(folder))
        saved_s = time.perf_counter() - started
    costs = {"fixed_s": fixed_s, "token_s": token_s, "trajectory_s": trajectory_s}
    return costs, {"fixed_s": saved_s, "gib_s": written_s(256 << 20) * 3.0}


async def reward(vocabulary: int) -> float:
    """Return the CPU seconds of a group in the quickstart's reward stage and the process of its function."""
    tokenizer = character_tokenizer()
    shape = replace(SHAPES["quickstart"], groups=REWARDED)
    groups = [
        StageGroup(group=one.group, row={"prompt": "1+2=", "answer": "3"}, payload=one.payload)
        for one in groups_of(shape, 0, vocabulary)
    ]
    run = "staleflow.examples.quickstart.task:reward"
    async with reward_stage(
        RewardSettings(run=run), lambda rows: tokenizer.batch_decode([row.tolist() for row in rows])
    ) as stage:
        await stage.make(groups[:4])
        before_s = cpu_s()
        await stage.make(groups)
        return (cpu_s() - before_s) / REWARDED


def cpu_s() -> float:
    """CPU seconds of this process and its children so far."""
    return time.process_time() + sum(cpu_seconds(family()).values())


def written_s(nbytes: int) -> float:
    """Return the seconds for each GiB to write a file of ``nbytes`` and flush it to the disk."""
    with tempfile.NamedTemporaryFile() as file:
        data = np.random.default_rng(0).bytes(nbytes)
        started = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return (time.perf_counter() - started) * GIB / nbytes


def main() -> None:
    torch.set_num_threads(1)
    reuse_memory()
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder), 0, steps=1)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        decode = engine(model)
        step, checkpoint = trainer(Path(folder))
        group_s = asyncio.run(reward(model.config.vocab_size))
    print(json.dumps({"engine": decode, "trainer": step, "checkpoint": checkpoint, "reward": {"group_s": group_s}}))


if __name__ == "__main__":
    main()
