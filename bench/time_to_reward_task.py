# pyright: basic, reportMissingImports=false
# mypy: disable-error-code="no-untyped-call"
"""Workloads of ``bench.time_to_reward``: the quickstart, also with a slow reward, slow tool calls, a real model."""

import asyncio
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import Qwen3ForCausalLM

from staleflow.clients.rollout.episodes.env_client import Client, EpisodeOver
from staleflow.examples.built_models import kept
from staleflow.examples.environments.calculator import EXPRESSION, calculate
from staleflow.examples.environments.model import chat_tokenizer, warm_up
from staleflow.examples.quickstart import task
from staleflow.examples.quickstart.model import EOS, shape

CONFIGS: Final = Path(__file__).parent.parent / "configs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A configuration, the settings that make it this workload, and the reward to reach."""

    config: Path
    overrides: tuple[str, ...] = ()
    steps: int
    evaluate_every: int
    goal: float
    score: str = "staleflow.examples.quickstart.task:reward"
    """Score of an answer in the evaluation, without the waits of the reward."""
    held_out: int | None = None
    """Number of held-out prompts; None: all."""
    end: str = ""
    """Token that ends an answer, if that is not the model's own."""


WORKLOADS: Final[Mapping[str, Workload]] = {
    "quickstart": Workload(config=CONFIGS / "quickstart.toml", steps=120, evaluate_every=10, goal=0.9),
    "slow-reward": Workload(
        config=CONFIGS / "quickstart.toml",
        overrides=('reward={run="bench.time_to_reward_task:slow_reward"}',),
        steps=40,
        evaluate_every=10,
        goal=0.6,
    ),
    "tools": Workload(
        config=CONFIGS / "environment.toml",
        overrides=(
            "model.build=bench.time_to_reward_task:build",
            "environment.run=bench.time_to_reward_task:SlowCalculator",
            "environment.timeout_s=120",
            "environment.max_turns=0",
            "staleness.max_staleness=2",
        ),
        steps=12,
        evaluate_every=3,
        goal=0.54,
    ),
    "smollm2": Workload(
        config=CONFIGS / "smollm2.toml",
        overrides=("model.lora.rank=16", "trainer.lr=2e-4", "trainer.batch_size=4", "rollout.max_inflight=32"),
        steps=12,
        evaluate_every=3,
        goal=0.4,
        score="staleflow.examples.reasoning:reward",
        held_out=64,
        end="\n",
    ),
}

# --- slow reward ---

MEDIAN_S, SIGMA = 0.8, 0.6


def latency(*seeds: object) -> float:
    """Return the seconds of one reward, the same for the same sample."""
    return MEDIAN_S * random.Random(repr(seeds)).lognormvariate(0.0, SIGMA)


async def slow_reward(prompt: str, completion: str, answer: str, **_: object) -> float:
    """Return the quickstart's reward as a slow judge would."""
    await asyncio.sleep(latency(prompt, completion))
    return task.reward(prompt, completion, answer)


# --- slow tools ---

TOOL_S: Final = (0.5, 3.0)
"""Bounds of the duration of a call, uniform in its logarithm."""
MAX_BUSY: Final = 8
BUSY: Final = "?"
"""Reply of a busy calculator; the model then calls it again."""


class Tool:
    """The calculator in one episode. It is busy for the first calls: for at least ``n`` with probability
    ``(n + 1) ** -1.5``."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._busy = busy_calls(rng)
        self._calls = 0

    def call(self, expression: str) -> tuple[str, float]:
        """Return the reply and the seconds that it takes."""
        self._calls += 1
        low, high = TOOL_S
        seconds = low * (high / low) ** self._rng.random()
        return calculate(expression) if self._calls > self._busy else BUSY, seconds


def busy_calls(rng: random.Random) -> int:
    return min(MAX_BUSY, int((1.0 - rng.random()) ** (-1 / 1.5)) - 1)


def is_call(message: str) -> bool:
    """Return whether the model calls the tool; any other message is its answer."""
    return EXPRESSION.fullmatch(message.strip()) is not None


MAX_CALLS: Final = MAX_BUSY + 2


class SlowCalculator:
    """Environment of staleflow. Rows need ``prompt`` and ``answer``."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)

    async def rollout(self, client: Client, row: Mapping[str, Any]) -> float:
        """1 for exactly the answer."""
        tool, messages = Tool(self._rng), [{"role": "user", "content": row["prompt"]}]
        for _ in range(MAX_CALLS + 1):
            try:
                reply = await client.chat.completions.create(messages=messages)
            except EpisodeOver:
                return 0.0
            text = reply.choices[0].message.content
            if not is_call(text):
                return float(text.strip() == row["answer"])
            value, seconds = tool.call(text)
            await asyncio.sleep(seconds)
            messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": value}]
        return 0.0


@kept
def build(directory: Path, seed: int, *, limit: int, hedged: float, steps: int, threads: int) -> None:
    """Write a model as ``configs/environment.toml`` has it, which has also seen the calculator busy."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    tokenizer = chat_tokenizer()
    model = Qwen3ForCausalLM(shape(tokenizer, 48, 2, 4))
    model.config.max_position_embeddings = 256
    examples = dialogues(task.prompts(seed, limit=limit), seed, hedged)
    warm_up(model, tokenizer, examples, steps, 32, 4e-3)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def dialogues(rows: Sequence[dict[str, str]], seed: int, hedged: float) -> Iterator[list[tuple[str, bool]]]:
    """Yield endless dialogues as pieces of text, each with whether the assistant wrote it."""
    rng = random.Random(seed)
    while True:
        row = rng.choice(rows)
        expression = row["prompt"].rstrip("=")
        pieces = [(f"<user>{row['prompt']}<assistant>", False)]
        for value in [BUSY] * busy_calls(rng) + [calculate(expression)]:
            pieces += [(f"{expression}{EOS}", True), (f"<tool>{value}<assistant>", False)]
        yield [*pieces, (row["answer"] + "?" * (rng.random() < hedged) + EOS, True)]
