# pyright: basic, reportMissingImports=false, reportPrivateImportUsage=false
# mypy: disable-error-code="no-untyped-call, misc"
"""Processes of ``bench.time_to_reward``: ``python -m bench.time_to_reward_ways VERB WORKLOAD SEED DIRECTORY``.

``build`` writes the initial model to ``DIRECTORY/model``. ``train`` trains it with TRL's ``GRPOTrainer``, with the
hyper-parameters of the workload's configuration, and saves ``DIRECTORY/trl/checkpoint-STEP``. ``evaluate`` prints the
held-out reward of each model directory that it reads from the standard input.
"""

import asyncio
import inspect
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from bench.time_to_reward_task import MAX_CALLS, WORKLOADS, Tool, is_call
from staleflow.configs.imports import load_object
from staleflow.configs.loading.load import load
from staleflow.configs.schema import Config

START = "started.json"
EVALUATED_SAMPLES = 2
"""Samples for each held-out prompt."""
MAX_TOKENS = 120
"""Length of an episode with the most calls."""


def config_of(name: str, seed: int) -> Config:
    workload = WORKLOADS[name]
    return load(workload.config, [*workload.overrides, f"seed={seed}"])


# --- generation ---


def answers(model: Any, tokenizer: Any, contexts: Sequence[Sequence[int]], limit: int) -> list[list[int]]:
    """Sample one continuation of each context, with its end token."""
    width = max(map(len, contexts))
    pad = tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (width - len(context)) + list(context) for context in contexts])
    mask = torch.tensor([[0] * (width - len(context)) + [1] * len(context) for context in contexts])
    with torch.no_grad():
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=limit,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
        )
    rows = out[:, width:].tolist()
    end = tokenizer.eos_token_id
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def play(
    model: Any, tokenizer: Any, prompts: Sequence[str], limit: int, rng: random.Random, *, wait: bool
) -> dict[str, Any]:
    """Play an episode for each prompt. All calls of a turn are made at once, and the next turn starts after the
    longest.
    """
    starts = [tokenizer.encode(f"<user>{prompt}<assistant>") for prompt in prompts]
    completions: list[list[int]] = [[] for _ in prompts]
    masks: list[list[int]] = [[] for _ in prompts]
    finals, tools = [""] * len(prompts), [Tool(rng) for _ in prompts]
    open_rows = list(range(len(prompts)))
    for _ in range(MAX_CALLS + 1):
        contexts = [starts[row] + completions[row] for row in open_rows]
        waits, rows = [0.0], []
        for row, new in zip(open_rows, answers(model, tokenizer, contexts, limit), strict=True):
            completions[row] += new
            masks[row] += [1] * len(new)
            text = tokenizer.decode(new, skip_special_tokens=True)
            if new[-1] != tokenizer.eos_token_id or not is_call(text):
                finals[row] = text
                continue
            value, seconds = tools[row].call(text)
            reply = tokenizer.encode(f"<tool>{value}<assistant>")
            completions[row] += reply
            masks[row] += [0] * len(reply)
            waits.append(seconds)
            rows.append(row)
        open_rows = rows
        if not rows:
            break
        if wait:
            time.sleep(max(waits))
    return {"prompt_ids": starts, "completion_ids": completions, "env_mask": masks, "final": finals, "logprobs": None}


# --- TRL ---


class Started(TrainerCallback):
    """Records the time at which training starts."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._file.write_text(json.dumps(time.time()))


def reward_of(config: Config, columns: Sequence[str]) -> Callable[..., Any]:
    """Return the reward of a run as TRL calls it: once with all samples and the ``columns`` of their rows.

    An async function waits for all at once.
    """
    if config.environment.run:
        return lambda final, answer, **_: [
            float(one.strip() == right) for one, right in zip(final, answer, strict=True)
        ]
    reward = load_object(config.reward.run, "reward.run")

    def calls(prompts: Any, completions: Any, given: dict[str, Any]) -> list[Any]:
        rows = zip(*(given[name] for name in columns), strict=True)
        return [
            reward(prompt, completion, **dict(zip(columns, row, strict=True)))
            for prompt, completion, row in zip(prompts, completions, rows, strict=True)
        ]

    if not inspect.iscoroutinefunction(reward):
        return lambda prompts, completions, **given: calls(prompts, completions, given)

    async def together(prompts: Any, completions: Any, **given: Any) -> list[float]:
        return list(await asyncio.gather(*calls(prompts, completions, given)))

    return together


def adapter_of(config: Config) -> Any:
    """Return the adapter as ``peft`` describes it, or None."""
    lora = config.model.lora
    if not lora.rank:
        return None
    from peft import LoraConfig

    targets = list(lora.target_modules) or "all-linear"
    return LoraConfig(r=lora.rank, lora_alpha=int(lora.alpha), target_modules=targets, task_type="CAUSAL_LM")


def train(name: str, seed: int, directory: Path) -> None:
    """Train with ``GRPOTrainer``; episodes are played by its ``rollout_func``."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    workload, config = WORKLOADS[name], config_of(name, seed)
    trainer, rollout, algorithm = config.trainer, config.rollout, config.trainer.algorithm
    tokenizer, rng = AutoTokenizer.from_pretrained(directory / "model"), random.Random(seed)

    if workload.end:
        (tokenizer.eos_token_id,) = tokenizer.encode(workload.end, add_special_tokens=False)

    def episodes(prompts: list[str], grpo: Any) -> dict[str, Any]:
        grpo.model.eval()
        played = play(grpo.model, tokenizer, prompts, rollout.max_new_tokens, rng, wait=True)
        grpo.model.train()
        return played

    arguments = GRPOConfig(
        output_dir=str(directory / "trl"),
        seed=seed,
        per_device_train_batch_size=trainer.batch_size * rollout.group_size,
        num_generations=rollout.group_size,
        max_completion_length=MAX_TOKENS if config.environment.run else rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=1.0,
        top_k=0,
        max_steps=workload.steps,
        learning_rate=trainer.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=trainer.warmup_steps,
        adam_beta2=trainer.betas[1],
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.grad_clip,
        epsilon=algorithm.clip_low,
        epsilon_high=algorithm.clip_high,
        beta=0.0,
        loss_type="dapo",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="steps",
        save_steps=workload.evaluate_every,
        save_only_model=True,
        report_to=[],
        disable_tqdm=True,
        logging_steps=workload.evaluate_every,
        model_init_kwargs={"dtype": "float32"},
    )
    rows = [*load_object(config.prompts.source, "prompts.source")(seed, **config.prompts.options)]
    GRPOTrainer(
        model=str(directory / "model"),
        reward_funcs=reward_of(config, [name for name in rows[0] if name != "prompt"]),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Started(directory / START)],
        rollout_func=episodes if config.environment.run else None,
        processing_class=tokenizer,
        peft_config=adapter_of(config),
    ).train()


# --- evaluation ---


def evaluate(name: str, seed: int, model_directory: Path) -> float:
    """Return the mean reward on all held-out prompts, sampled as in training, without any waiting."""
    config = config_of(name, seed)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(model_directory)
    tokenizer: Any = AutoTokenizer.from_pretrained(model_directory)
    rows = load_object(config.prompts.eval_source, "prompts.eval_source")(seed, **config.prompts.options)
    rows = [*itertools.islice(rows, WORKLOADS[name].held_out)] * EVALUATED_SAMPLES
    prompts, limit = [row["prompt"] for row in rows], config.rollout.max_new_tokens
    if config.environment.run:
        texts = play(model, tokenizer, prompts, limit, random.Random(0), wait=False)["final"]
    else:
        new = answers(model, tokenizer, [tokenizer.encode(prompt) for prompt in prompts], limit)
        texts = tokenizer.batch_decode(new, skip_special_tokens=True)
    score = load_object(WORKLOADS[name].score, "score")
    right: list[float] = [score(completion=text, **row) for row, text in zip(rows, texts, strict=True)]
    return sum(right) / len(right)


def build(name: str, seed: int, target: Path) -> None:
    """Write the initial model of a workload."""
    model = config_of(name, seed).model
    load_object(model.build, "model.build")(target, seed, **model.options)


def main(verb: str, name: str, seed: str, directory: str) -> None:
    if verb == "build":
        build(name, int(seed), Path(directory, "model"))
    elif verb == "train":
        train(name, int(seed), Path(directory))
    else:
        print(json.dumps([evaluate(name, int(seed), Path(line.strip())) for line in sys.stdin]))


if __name__ == "__main__":
    main(*sys.argv[1:])
