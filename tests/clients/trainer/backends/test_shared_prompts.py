# pyright: basic, reportMissingImports=false
# mypy: disable-error-code="no-untyped-call"
"""Passes that compute the prompt of a group once give the log-probabilities and gradients of padded ones."""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from staleflow.clients.models.passes import computed, shared_passes
from staleflow.clients.trainer.backends import prompt_layout, shared_prompts
from staleflow.clients.trainer.backends.forward import completion_logprobs
from staleflow.clients.trainer.backends.output_layer import from_logits
from staleflow.clients.trainer.backends.prompt_attention import sharing_attention
from staleflow.clients.trainer.backends.prompt_layout import lay_out, shared_lengths
from staleflow.clients.trainer.backends.shared_prompts import shared_logprobs, why_not_shared
from staleflow.clients.trainer.data.batch import FetchedGroup, TrainBatch, assemble
from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import GroupId, Step
from tests.clients.trainer.making import batch, config, header, payload

CPU = torch.device("cpu")
EVERY_BLOCK, ONE_BLOCK = 0, 1 << 22
"""Block areas with which each block has runs of one prompt length and similar lengths, or all runs."""


def built(kind: str, **more: Any) -> Any:
    """A small random model, whose output depends strongly on its context."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    heads: dict[str, Any] = {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
    small: dict[str, Any] = {"vocab_size": 20, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    small |= {"pad_token_id": 18} | (heads if kind != "falcon" else {}) | more
    torch.manual_seed(7)
    build: Any = AutoModelForCausalLM.from_config
    model = build(CONFIG_MAPPING[kind](**small)).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model


def ragged() -> TrainBatch:
    """Groups with prompts of several lengths, one with an empty completion, one of a single sample."""
    shapes = [(5, [4, 9, 1, 30]), (12, [3, 0, 6]), (5, [2, 2, 8]), (3, [7])]
    made = [
        FetchedGroup(group=GroupId(number), row={}, payload=payload(number, lengths, prompt=prompt))
        for number, (prompt, lengths) in enumerate(shapes)
    ]
    return assemble(header(0), made)


def several_turns() -> TrainBatch:
    """Groups whose completions have tokens of an environment between those of the model."""
    made = list[FetchedGroup]()
    for number, lengths in enumerate([[9, 14, 6], [20, 8, 11]]):
        group = payload(number, lengths, prompt=4 + number)
        written = np.ones(sum(lengths), np.uint8)
        written[2:5] = written[-4:-2] = 0
        made.append(FetchedGroup(group=GroupId(number), row={}, payload=replace(group, loss_mask=written)))
    return assemble(header(0), made)


def different_prompts() -> TrainBatch:
    """A group whose prompts differ from their third token on, and one whose prompts have nothing in common."""
    data = batch(0)
    data.input_ids[1, 2] = (data.input_ids[0, 2] + 1) % 18
    (second,) = np.nonzero(data.group_ids == 1)
    data.input_ids[second, 0] = np.arange(len(second))
    return data


BATCHES = {"ragged": ragged, "several turns": several_turns, "different prompts": different_prompts}


def computes(model: Any, data: TrainBatch, which: NDArray[np.int64], *, shared: bool) -> tuple[Any, dict[str, Any]]:
    """Return the log-probabilities and the gradient of a weighted sum of them."""

    def forward(**inputs: Any) -> torch.Tensor:
        logits: torch.Tensor = model(use_cache=False, **inputs).logits
        return logits

    model.zero_grad()
    if shared:
        with sharing_attention(model):
            logprobs = shared_logprobs(from_logits(forward, 0.7), data, which, CPU)
            (logprobs * torch.linspace(-1.0, 1.0, len(logprobs))).sum().backward()
    else:
        logprobs = completion_logprobs(from_logits(forward, 0.7), data, which, CPU, packing=False)
        (logprobs * torch.linspace(-1.0, 1.0, len(logprobs))).sum().backward()
    return logprobs.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("block_area", [EVERY_BLOCK, ONE_BLOCK])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mixtral"])
def test_shared_passes_have_the_log_probabilities_and_gradient_of_padded_ones(
    monkeypatch: pytest.MonkeyPatch, kind: str, block_area: int, rows: str
) -> None:
    monkeypatch.setattr(shared_prompts, "lay_out", partial(lay_out, block_area=block_area))
    model, data = built(kind), BATCHES[rows]()
    which = np.arange(len(data.rewards))[::-1].copy()
    padded, expected = computes(model, data, which, shared=False)
    logprobs, gradient = computes(model, data, which, shared=True)
    assert len(logprobs) == int(data.completion_lengths.sum())
    assert float(padded.std()) > 0.5  # a model that ignores its context would pass the rest
    torch.testing.assert_close(logprobs, padded, atol=1e-4, rtol=0)
    for name, wanted in expected.items():
        scale = float(wanted.abs().max())
        torch.testing.assert_close(gradient[name], wanted, atol=2e-5 * max(scale, 1.0), rtol=0, msg=name)
    assert model.config._attn_implementation == "sdpa"


def test_a_shared_pass_has_no_mask_of_the_whole_sequence() -> None:
    """Its positions restart in each run, for which sdpa would get a mask of tokens squared: 1 GiB for 32,768 tokens."""
    model, masks = built("qwen2"), list[Any]()
    model.model.layers[0].register_forward_pre_hook(
        lambda _, __, inputs: masks.append(inputs["attention_mask"]), with_kwargs=True
    )
    computes(model, ragged(), np.arange(11), shared=True)
    assert masks == [None]


def seen(trainer: TorchTrainer) -> list[tuple[int, ...]]:
    """The shapes of the token ids of each pass from now on."""
    shapes: list[tuple[int, ...]] = []
    trainer.model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape))
    return shapes


@pytest.mark.parametrize("micro_tokens", [20, 48, 4000])
def test_a_step_of_shared_passes_is_the_step_of_padded_ones(model_directory: Path, micro_tokens: int) -> None:
    """With 20 tokens a pass, groups are split."""
    padded = TorchTrainer(config(micro_tokens=micro_tokens, share_prompts=False), model_directory)
    shared = TorchTrainer(config(micro_tokens=micro_tokens, packing=True), model_directory)
    shapes = seen(shared)
    first = padded.train(several_turns(), Step(0), lambda: False).values
    values = shared.train(several_turns(), Step(0), lambda: False).values
    assert values == pytest.approx(first, rel=1e-4, abs=1e-6)
    for (name, left), right in zip(padded.weights().items(), dict(shared.weights().items()).values(), strict=True):
        assert np.allclose(left, right, atol=2e-5), name
    assert all(rows == 1 for rows, _ in shapes)
    once, alone = 4 + 29 + 5 + 39, 3 * 4 + 29 + 3 * 5 + 39
    assert sum(tokens for _, tokens in shapes) == {20: alone - 4, 48: once, 4000: once}[micro_tokens]
    assert len(shapes) == {20: 5, 48: 2, 4000: 1}[micro_tokens]


def test_recomputed_activations_give_the_same_shared_step(model_directory: Path) -> None:
    kept = TorchTrainer(config(), model_directory)
    again = TorchTrainer(config(gradient_checkpointing=True), model_directory)
    first = kept.train(ragged(), Step(0), lambda: False).values
    assert again.train(ragged(), Step(0), lambda: False).values == pytest.approx(first, rel=1e-6)


def test_prompts_are_not_shared_where_groups_have_one_sample_or_the_key_is_off(model_directory: Path) -> None:
    table = msgspec.to_builtins(config())
    alone = msgspec.convert(table | {"rollout": table["rollout"] | {"group_size": 1}}, Config)
    for settings in (config(share_prompts=False), alone):
        trainer = TorchTrainer(settings, model_directory)
        shapes = seen(trainer)
        trainer.train(batch(0), Step(0), lambda: False)
        assert shapes == [batch(0).input_ids.shape]


def test_a_group_too_large_for_a_pass_is_split_and_the_others_stay_together() -> None:
    lengths, groups = np.array([14, 13, 12, 14, 8, 9]), np.array([7, 7, 7, 7, 3, 3])
    shared = np.array([10, 10, 10, 10, 6, 6])
    assert [rows.tolist() for rows in shared_passes(lengths, shared, groups, 100)] == [[4, 5, 0, 1, 2, 3]]
    assert [rows.tolist() for rows in shared_passes(lengths, shared, groups, 23)] == [[0, 1, 2, 3], [4, 5]]
    assert [rows.tolist() for rows in shared_passes(lengths, shared, groups, 17)] == [[0, 1], [2, 3], [4, 5]]
    assert sorted(rows.tolist() for rows in shared_passes(lengths, shared, groups, 5)) == [[row] for row in range(6)]
    assert computed(lengths, shared, groups) == (10 + 4 + 3 + 2 + 4 + 6 + 2 + 3, 14**2 + 69 + 44 + 96 + 8**2 + 45)
    assert shared_passes(lengths[:0], shared[:0], groups[:0], 5) == []


@given(st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=6), min_size=1, max_size=6), st.integers(1, 80))
def test_every_row_is_in_one_pass_of_at_most_the_given_tokens(shapes: list[list[int]], micro_tokens: int) -> None:
    made = [
        FetchedGroup(group=GroupId(9 - number), row={}, payload=payload(number, lengths, prompt=1 + 3 * number))
        for number, lengths in enumerate(shapes)
    ]
    data = assemble(header(0), made)
    lengths, shared = data.sequence_lengths, shared_lengths(data)
    passes = shared_passes(lengths, shared, data.group_ids, micro_tokens)
    assert sorted(row for rows in passes for row in rows.tolist()) == list(range(len(lengths)))
    for rows in passes:
        prompts = lengths[rows] - data.completion_lengths[rows]
        sequence = lay_out(data.input_ids[rows], lengths[rows], prompts, data.group_ids[rows])
        tokens, _ = computed(lengths[rows], shared[rows], data.group_ids[rows])
        assert len(sequence.input_ids) == tokens
        assert tokens <= micro_tokens or len(np.unique(data.group_ids[rows][data.completion_lengths[rows] > 0])) <= 1
    whole = computed(lengths, shared, data.group_ids)[0]
    assert len(passes) == 1 or whole > micro_tokens


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mistral": ({"sliding_window": 4}, "it has sliding windows"),
    "lfm2": ({"full_attn_idxs": [1]}, "it has layers of type conv"),
    "falcon": ({"alibi": True, "bos_token_id": 1}, "its attention cannot be replaced"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_cannot_share_prompts_trains_without_and_the_log_has_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    more, reason = REFUSED[kind]
    built(kind, **more).save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO):
        trainer = TorchTrainer(config(), tmp_path)
    assert [line for line in caplog.messages if "prompt" in line] == [
        f"this model computes the prompt of a group once for each sample: {reason}"
    ]
    shapes = seen(trainer)
    plain = TorchTrainer(config(share_prompts=False), tmp_path).train(batch(0), Step(0), lambda: False).values
    assert trainer.train(batch(0), Step(0), lambda: False).values == plain
    assert shapes == [batch(0).input_ids.shape]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", ["", "seen", "late", "twice"])
def test_the_check_at_start_finds_a_pass_that_is_not_the_padded_one(
    monkeypatch: pytest.MonkeyPatch, fault: str, dtype: torch.dtype
) -> None:
    """A sample that sees another one, one whose positions start over, and a prompt that counts for one sample only."""
    model = built("qwen2").to(dtype)
    block, layout = prompt_layout._block, lay_out

    def seeing(runs: prompt_layout.Runs) -> prompt_layout.Block:
        first = runs.start[runs.prompt_start == runs.prompt_start[0]].min()
        return block(replace(runs, prompt_start=np.where(runs.start == first, runs.prompt_start, first - 1)))

    def wrong(*rows: Any, **more: Any) -> prompt_layout.Sequence:
        sequence = layout(*rows, **more)
        if fault == "late":
            return replace(sequence, positions=np.arange(len(sequence.positions)))
        return replace(sequence, predicting=sequence.predicting - (sequence.predicting == 4))

    if fault == "seen":
        monkeypatch.setattr(prompt_layout, "_block", seeing)
    elif fault:
        monkeypatch.setattr(shared_prompts, "lay_out", wrong)

    def forward(**inputs: Any) -> torch.Tensor:
        logits: torch.Tensor = model(use_cache=False, **inputs).logits
        return logits

    reason = why_not_shared(model, forward, lambda loss: loss.backward(), CPU)
    assert ("would deviate by" in reason) == bool(fault), reason
