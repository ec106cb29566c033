# pyright: basic, reportMissingImports=false
# mypy: disable-error-code="no-untyped-call"
"""The agent with a tool runs in its own process, against a small model that writes the calls itself."""

from pathlib import Path

import numpy as np
import pytest

from staleflow.clients.rollout.engines.base import Sampling
from staleflow.clients.rollout.engines.thread import EngineThread
from staleflow.clients.rollout.episodes.environment import Environments
from staleflow.clients.rollout.groups import ActiveLease, Recipe
from staleflow.configs.schema import Config, Environment, Prompts, Reward
from tests.clients.rollout.peers import assign

pytest.importorskip("torch")
pytest.importorskip("openai")

AGENT = "staleflow.examples.environments.agent:CalculatorAgent"
GROUP = 8


async def test_the_policy_calls_the_tool_and_exactly_its_tokens_are_trained(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from staleflow.clients.rollout.engines.transformers.engine import TransformersEngine
    from staleflow.clients.rollout.episodes.chat.tokenizer import open_chat_template
    from staleflow.clients.tokens import open_tokenizer
    from staleflow.examples.environments import agent_model

    agent_model.build.__wrapped__(tmp_path / "model", 0, limit=3, hedged=0.0, steps=60, batch=16)  # type: ignore[attr-defined]
    tokenizer = open_tokenizer(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    engine = EngineThread(TransformersEngine(model, [tokenizer.eos_token_id], slots=GROUP, version=0))
    config = Config(
        prompts=Prompts(path="p"), reward=Reward(run=""), environment=Environment(run=AGENT, timeout_s=100.0)
    )
    recipe = Recipe(group_size=GROUP, started=GROUP, sampling=Sampling(max_new_tokens=16, temperature=0.5), seed=0)
    environments = Environments(config, engine, open_chat_template(tmp_path / "model"), recipe)
    try:
        await environments.start()
        payload = await environments.produce(ActiveLease(assign(1)), {"prompt": "2+1=", "answer": "3"})
    finally:
        await environments.close()
        await engine.close()
    payload.check()
    assert tokenizer.decode(payload.prompt_ids.tolist()) == "<tools>calculator<user>2+1=<assistant>"
    calculated = payload.stages["stage/environment/calculated"]
    right = np.flatnonzero(payload.stages["stage/environment/reward"] * (calculated == 1))
    assert right.size >= GROUP // 4, "some samples call the tool once, then give the right answer"
    sample = int(right[0])
    start = int(payload.lengths[:sample].sum())
    tokens = slice(start, start + int(payload.lengths[sample]))
    sampled = payload.loss_mask[tokens] == 1
    assert tokenizer.decode(payload.token_ids[tokens][~sampled].tolist()) == "<tool>3<assistant>"
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "2+1"}}</tool_call><eos>'
    assert tokenizer.decode(payload.token_ids[tokens][sampled].tolist()) == f"{call}3<eos>"
