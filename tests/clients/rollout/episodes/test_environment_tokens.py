# pyright: basic, reportMissingImports=false
# mypy: disable-error-code="no-untyped-call"
"""The sampled tokens are the trained tokens: episodes of a real model are replayed through its own forward pass."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from staleflow.clients.rollout.engines.base import Sampling
from staleflow.clients.rollout.engines.thread import EngineThread
from staleflow.clients.rollout.episodes.chat.routes import CHAT
from staleflow.clients.rollout.episodes.chat.transcript import group_payload
from staleflow.clients.rollout.episodes.episode import Episode
from staleflow.clients.trainer.data.batch import FetchedGroup, TrainBatch, assemble
from staleflow.configs.schema import Environment
from staleflow.protocols.consistency.ids import BatchId, GroupId, Lineage, Step, Version
from staleflow.protocols.wire.messages import Batch
from staleflow.protocols.wire.trajectory import GroupPayload

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from staleflow.clients.models.likelihood import token_logprobs  # noqa: E402
from staleflow.clients.rollout.engines.transformers.engine import TransformersEngine  # noqa: E402
from staleflow.clients.rollout.episodes.chat.tokenizer import TokenizerChatTemplate  # noqa: E402
from staleflow.clients.trainer.backends.tensors import to_arrays  # noqa: E402
from staleflow.examples.environments.model import chat_tokenizer  # noqa: E402

TOKENIZER = chat_tokenizer()
EOS = "<eos>"
EOS_ID = 1
TOOLS = ["7", "12+3", "?", "-5"]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_of(version: int) -> Any:
    """Build different weights for each version, far from uniform so that a wrong token or position shows."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(version)
    config = Qwen3Config(
        vocab_size=len(TOKENIZER),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    return Qwen3ForCausalLM(config).eval()


def decode(completions: list[Any]) -> list[str]:
    return [TokenizerChatTemplate(TOKENIZER).text(ids) for ids in completions]


class Heard:
    """An episode, with the tokens that its environment wrote between the turns."""

    def __init__(self, runner: EngineThread, temperature: float, seed: int) -> None:
        sampling = Sampling(max_new_tokens=12, temperature=temperature)
        self.episode = Episode(runner, TokenizerChatTemplate(TOKENIZER), sampling, seed=seed, settings=Environment())
        self.messages: list[dict[str, str]] = []
        self.written: list[list[int]] = []
        self._last_ended = True

    async def turn(self, role: str, content: str, **arguments: Any) -> None:
        self.messages.append({"role": role, "content": content})
        reply = await self.episode.answer(CHAT, {"messages": self.messages, **arguments})
        assert isinstance(reply, dict)
        choice = reply["choices"][0]
        before = "" if self._last_ended else EOS
        self.written.append(TOKENIZER.encode(f"{before}<{role}>{content}<assistant>"))
        self._last_ended = choice["token_ids"][-1] == EOS_ID
        self.messages.append(choice["message"])


async def play(
    seed: int, temperature: float, turns: list[tuple[str, int, str | None, bool]]
) -> tuple[GroupPayload, list[Heard]]:
    """Play two episodes of these turns (tool's answer, max_tokens, stop, whether new weights precede the turn)."""
    engine = TransformersEngine(model_of(0), [EOS_ID], decode=decode, slots=4, version=0)
    runner = EngineThread(engine)
    try:
        both = [Heard(runner, temperature, seed + sample) for sample in range(2)]
        version = 0
        for number, (content, limit, stop, update) in enumerate(turns):
            if update:
                version += 1
                await runner.load(to_arrays(model_of(version).state_dict()), Lineage(0), Version(version))
            for sample, heard in enumerate(both):
                role, said = ("tool", content) if number else ("user", f"1+{sample}{content}")
                await heard.turn(role, said, max_tokens=limit, **({"stop": stop} if stop else {}))
        payload = group_payload([heard.episode.transcript for heard in both], {})
        payload.stages["stage/reward/reward"] = np.zeros(2, np.float32)
        payload.check()
        return payload, both
    finally:
        await runner.close()


def as_batch(payload: GroupPayload) -> TrainBatch:
    header = Batch(
        batch=BatchId(0), step=Step(9), lineage=Lineage(0), members=[], digest="", attempt=1, mask_below=Version(0)
    )
    return assemble(header, [FetchedGroup(group=GroupId(1), row={}, payload=payload)])


turn = st.tuples(st.sampled_from(TOOLS), st.integers(1, 12), st.sampled_from([None, None, "1", "+-"]), st.booleans())


@settings(max_examples=25, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.integers(0, 2**31), st.sampled_from([1.0, 0.7]), st.lists(turn, min_size=1, max_size=4))
def test_the_trainers_forward_pass_gives_what_the_engine_said_of_every_trained_token(
    seed: int, temperature: float, turns: list[tuple[str, int, str | None, bool]]
) -> None:
    payload, both = asyncio.run(play(seed, temperature, turns))
    batch = as_batch(payload)
    prompt = len(payload.prompt_ids)
    versions = sorted({int(v) for v in batch.token_versions[batch.loss_mask]})
    for version in versions:
        with torch.inference_mode():
            input_ids = torch.from_numpy(batch.input_ids)
            logits = model_of(version)(
                input_ids=input_ids, attention_mask=torch.from_numpy(batch.attention_mask)
            ).logits
            own = token_logprobs(logits, input_ids, temperature).numpy()
        here = batch.loss_mask & (batch.token_versions == version)
        np.testing.assert_allclose(own[here], batch.behavior_logprobs[here], atol=1e-4, rtol=0)
    for row, heard in enumerate(both):
        masked = ~batch.loss_mask[row] & (np.arange(batch.input_ids.shape[1]) < batch.sequence_lengths[row])
        expected = [token for tokens in heard.written for token in tokens]
        assert batch.input_ids[row][masked].tolist() == expected
        sampled = [t for turn in heard.episode.transcript.turns for t in turn.token_ids.tolist()]
        assert batch.input_ids[row][batch.loss_mask[row]].tolist() == sampled
        assert (batch.behavior_logprobs[row][masked] == 0).all()
        whole = heard.episode.transcript.token_ids
        assert batch.input_ids[row][: len(whole)].tolist() == whole.tolist()
    assert batch.sampled_lengths.tolist() == batch.loss_mask.sum(axis=1).tolist()
    assert prompt == len(both[0].written[0]) - len("0" + turns[0][0] + "A")
    assert batch.off_policy()[1] == 9 - min(versions)
