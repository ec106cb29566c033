# pyright: basic, reportMissingImports=false
"""With max_staleness 0, ledger, engine and trainer together are the synchronous algorithm, step by step.

The reference is a loop in the plainest torch: no cache, no padding, no batches of ragged rows; a forward pass over the
whole sequence for each drawn token, and AdamW over everything.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.learning_run import Loop, Problem
from staleflow.clients.rollout.engines.running_batch import uniforms
from staleflow.configs.schema import Config
from tests.clients.trainer.making import config

EOS, GROUP, BATCH, LONGEST, TEMPERATURE, RATE = 19, 4, 3, 6, 0.8, 3e-3
STEPS = 4


def settings(max_staleness: int, **algorithm: Any) -> Config:
    table = msgspec.to_builtins(config(lr=RATE, batch_size=BATCH, grad_clip=1e9, algorithm=algorithm))
    table["rollout"] |= {"group_size": GROUP, "max_new_tokens": LONGEST, "temperature": TEMPERATURE}
    table["staleness"] = {"max_staleness": max_staleness}
    return msgspec.convert(table | {"seed": 5}, Config)


def reward(token_ids: Sequence[int]) -> float:
    """Reward small digits and an early end."""
    return sum(1.0 for token in token_ids if token < 7) / LONGEST + (0.5 if EOS in token_ids else 0.0)


def problems() -> Iterator[Problem]:
    draw = np.random.default_rng(3)
    while True:
        yield Problem(prompt_ids=tuple(draw.integers(0, 17, 2 + int(draw.integers(3))).tolist()), reward=reward)


def drawn(model: Any, prompt: Sequence[int], seed: int) -> list[int]:
    """One completion, token by token, by inverse distribution at the engine's random numbers."""
    written: list[int] = []
    while len(written) < LONGEST and EOS not in written:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *written]])).logits[0, -1]
        share = torch.softmax(logits.double() / TEMPERATURE, 0).cumsum(0)
        number = float(uniforms(np.array([seed], np.uint64), np.array([len(written)]))[0])
        written.append(int((share < number * float(share[-1])).sum()))
    return written


def by_hand(directory: Path) -> Iterator[tuple[dict[str, torch.Tensor], float]]:
    """Synchronous GRPO: weights and mean reward after each step."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    adam = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    stream, number = problems(), 0
    while True:
        written: list[tuple[Sequence[int], list[int], float]] = []
        rewards: list[float] = []
        for _ in range(BATCH):
            prompt = next(stream).prompt_ids
            completions = []
            for _ in range(GROUP):
                completions.append(drawn(model, prompt, (5 << 40) + number))
                number += 1
            scores = [reward(completion) for completion in completions]
            mean, spread = np.mean(scores), np.std(scores, ddof=1)
            written += [
                (prompt, c, float((s - mean) / (spread + 1e-6))) for c, s in zip(completions, scores, strict=True)
            ]
            rewards += scores
        loss = torch.zeros(())
        for before, completion, advantage in written:
            scores_of = model(input_ids=torch.tensor([[*before, *completion]])).logits[0] / TEMPERATURE
            for place, token in enumerate(completion, len(before)):
                loss = loss - advantage * scores_of[place - 1].log_softmax(-1)[token]
        adam.zero_grad()
        (loss / sum(len(completion) for _, completion, _ in written)).backward()  # type: ignore[no-untyped-call]
        adam.step()
        yield {name: tensor.clone() for name, tensor in model.state_dict().items()}, float(np.mean(rewards))


def apart(loop: Loop, weights: dict[str, torch.Tensor]) -> float:
    own = loop.trainer.model.state_dict()
    return max(float((own[name] - tensor).abs().max()) for name, tensor in weights.items())


@pytest.mark.parametrize("algorithm", [{"correction": "none"}, {}, {"ratio_to": "behavior"}, {"loss": "aipo"}])
def test_without_staleness_it_is_the_hand_written_synchronous_loop(
    model_directory: Path, algorithm: dict[str, Any]
) -> None:
    loop = Loop(settings(0, **algorithm), model_directory, problems(), stop_ids=[EOS], debug=True)
    hand = by_hand(model_directory)
    start = {name: tensor.clone() for name, tensor in loop.trainer.model.state_dict().items()}
    for _ in range(STEPS):
        values, (weights, mean) = loop.step(), next(hand)
        assert values["reward"] == pytest.approx(mean, abs=1e-6)
        assert values["off_policy/max"] == 0
        assert apart(loop, weights) < 2e-5
    assert apart(loop, start) > 5e-3  # steps of RATE each: the weights moved far more than the tolerance


def test_with_staleness_it_is_not(model_directory: Path) -> None:
    """The comparison can fail: the second step trains data that the first weights wrote."""
    loop = Loop(settings(1), model_directory, problems(), stop_ids=[EOS], debug=True)
    hand = by_hand(model_directory)
    for step in range(3):
        values, (weights, _) = loop.step(), next(hand)
        assert values["off_policy/max"] == min(step, 1)
    assert apart(loop, weights) > 5e-4


@pytest.mark.parametrize("max_staleness", [1, 3])
def test_a_full_window_makes_every_batch_as_old_as_the_bound(model_directory: Path, max_staleness: int) -> None:
    loop = Loop(settings(max_staleness), model_directory, problems(), stop_ids=[EOS], debug=True)
    ages = [loop.step() for _ in range(6)]
    assert [values["off_policy/max"] for values in ages] == [min(step, max_staleness) for step in range(6)]
    assert ages[-1]["off_policy/mean"] == max_staleness
    assert [values["bad"] for values in ages] == [0.0] * 6


def test_under_the_token_bound_trajectories_span_versions_and_what_is_too_old_is_masked(model_directory: Path) -> None:
    table = msgspec.to_builtins(settings(1)) | {"staleness": {"max_staleness": 1, "bound": "token"}}
    table["rollout"] |= {"max_new_tokens": 24}
    often = [0, 1, 2, EOS]  # lengths vary widely: newer versions overtake the long ones
    loop = Loop(msgspec.convert(table, Config), model_directory, problems(), stop_ids=often, decode_steps=1, debug=True)
    steps = [loop.step() for _ in range(12)]
    assert max(values["off_policy/max"] for values in steps) == 1
    assert max(values["masked"] for values in steps) > 0.1
    assert 0 < steps[-1]["off_policy/mean"] < 1
