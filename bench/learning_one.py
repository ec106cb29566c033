# pyright: basic, reportMissingImports=false
"""One run of the learning benchmark: a task's model, a configuration, and the resulting curve."""

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from bench.learning_report import Run
from bench.learning_run import Loop, Problem, Task
from bench.learning_task import HELD_OUT, LONGEST, Row, model_of, problems, reward
from staleflow.clients.tokens import encoder, open_tokenizer
from staleflow.configs.rules.checks import consistent
from staleflow.configs.schema import Config
from staleflow.examples.quickstart.model import EOS_ID


def config_of(key: dict[str, Any], directory: Path) -> Config:
    """The configuration of a run; the algorithm is the shipped default except for its correction."""
    groups, samples = key["groups"], key["samples"]
    config = msgspec.convert(
        {
            "seed": key["seed"],
            "model": {"path": str(directory)},
            "prompts": {"source": "bench.learning_task:problems"},
            "reward": {"run": "bench.learning_task:reward"},
            "staleness": {"max_staleness": key["eta"], "bound": key["bound"]},
            "rollout": {
                "group_size": samples,
                "max_inflight": samples * groups * (key["eta"] + 2),
                "max_new_tokens": LONGEST + 4,
                "filter": "none",
            },
            "trainer": {
                "steps": key["steps"],
                "batch_size": groups,
                "micro_tokens": 8192,
                "lr": key["lr"],
                "warmup_steps": 5,
                "algorithm": {"correction": key["correction"]},
            },
        },
        Config,
    )
    consistent(config)
    return config


def task_of(key: dict[str, Any], cache: Path) -> Task:
    """Return one of the small tasks over digits."""
    directory = model_of(key["task"], key["seed"], cache)
    tokenizer = open_tokenizer(directory)
    encode = encoder(tokenizer, chat_template=False)
    characters = {number: character for character, number in tokenizer.get_vocab().items()}

    def problem(row: Row) -> Problem:
        def judge(token_ids: Any) -> float:
            return reward("".join(characters[token] for token in token_ids if token != EOS_ID), row)

        return Problem(prompt_ids=tuple(encode(row.prompt).tolist()), reward=judge)

    stream: Iterator[Problem] = map(problem, problems(key["task"], key["seed"]))
    held_out = [next(stream) for _ in range(HELD_OUT)]
    config = config_of(key, directory)
    return Task(config=config, directory=directory, problems=stream, held_out=held_out, stop_ids=[EOS_ID])


def train(key: dict[str, Any], cache: Path, *, every: int, decode_steps: int) -> Run:
    """Every metric at every step, and the held-out reward at intervals; the same key gives the same numbers."""
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    if key["task"] == "smollm2":
        from bench.learning_smollm2 import task_of as real  # the other tasks need no real model

        task = real(key, cache)
    else:
        task = task_of(key, cache)
    began = time.monotonic()
    in_place = decode_steps if key["bound"] == "token" else 0
    loop = Loop(task.config, task.directory, task.problems, stop_ids=task.stop_ids, decode_steps=in_place)
    steps, evaluated, rewards = [], [0], [loop.evaluate(task.held_out)]
    for step in range(1, key["steps"] + 1):
        steps.append(loop.step())
        if step % every == 0 or step == key["steps"]:
            evaluated.append(step)
            rewards.append(loop.evaluate(task.held_out))
    names = ("off_policy/mean", "off_policy/max", "is_weight/ess", "is_weight/max", "mismatch_kl", "masked",
             "masked/token", "is_weight/truncated", "grad_norm", "reward", "bad", "time/write",
             "time/train")  # fmt: skip
    return {
        "key": key,
        "samples_a_step": key["groups"] * key["samples"],
        "at": evaluated,
        "reward": rewards,
        "series": {name: [round(values[name], 6) for values in steps] for name in names},
        "drift": drift(steps),
        "seconds": round(time.monotonic() - began, 2),
    }


def drift(steps: Sequence[dict[str, float]]) -> dict[str, list[list[float]]]:
    """Return pairs of age and value, one for each step that trained tokens of that age, by metric."""
    return {
        name: [
            [int(metric.rpartition("_")[2]), round(value, 6)]
            for values in steps
            for metric, value in values.items()
            if metric.startswith(f"{name}/age_")
        ]
        for name in ("mismatch_kl", "is_weight/ess")
    }
