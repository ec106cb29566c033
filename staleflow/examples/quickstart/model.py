# pyright: basic, reportMissingImports=false
# mypy: disable-error-code="no-untyped-call"
"""Builds the quickstart's model directory: a small Qwen3 that has read some arithmetic. Adapter to transformers.

What ``build`` leaves is what any model directory holds, written by ``save_pretrained``, so that nothing after it knows
that this model was not downloaded. The supervised warm-up stands in for pretraining: it gives the model the format and
part of the ability, on text as noisy as ``text`` makes it, and stops there.

Only the functions that compute import torch and transformers, which takes seconds: the start of a run checks ``build``
without calling it, and copies a model that an earlier run built.
"""

import logging
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from staleflow.examples.built_models import kept
from staleflow.examples.quickstart import task, text

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
PAD_ID, EOS_ID = 0, 1
IGNORED = -100
"""Label of positions without a loss."""

LATEST = 512
"""Number of examples over which the accuracy is measured, each before the model trains on it."""

log = logging.getLogger(__name__)


@kept
def build(
    directory: Path,
    seed: int,
    *,
    limit: int = 100,
    operations: str = "+",
    hidden: int = 96,
    layers: int = 4,
    heads: int = 4,
    hedged: float = 0.6,
    skill: float = 0.85,
    steps: int = 1000,
    batch: int = 64,
    lr: float = 2e-3,
    threads: int = 1,
) -> None:
    """Write model and tokenizer into ``directory``, warmed up by at most ``steps`` steps of ``batch`` examples.

    ``limit`` and ``operations`` are the task's, ``hedged`` says how noisy the text is (``text.examples``), ``skill``
    at which share of right sums the warm-up comes to its end; ``threads`` are torch's while this function runs.
    """
    import torch
    from transformers import Qwen3ForCausalLM

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    try:
        tokenizer = character_tokenizer()
        model = Qwen3ForCausalLM(shape(tokenizer, hidden, layers, heads))
        rows = task.prompts(seed, limit=limit, operations=operations)
        examples = text.examples(rows, seed, hedged=hedged)
        warm_up(model, tokenizer, examples, skill=skill, steps=steps, batch=batch, lr=lr)
    finally:
        torch.set_num_threads(before)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def character_tokenizer() -> "PreTrainedTokenizerFast":
    """One token a character; ``<pad>`` is 0, ``<eos>`` 1, ``<unk>`` 2: any character that the text has not."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate([PAD, EOS, UNKNOWN, *text.CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, unk_token=UNKNOWN)


def shape(tokenizer: "PreTrainedTokenizerFast", hidden: int, layers: int, heads: int) -> "Qwen3Config":
    """A Qwen3 of usual proportions: grouped queries, four times as wide inside as outside, tied embeddings."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=hidden // heads,
        intermediate_size=4 * hidden,
        max_position_embeddings=64,
        initializer_range=hidden**-0.5,  # the usual 0.02 suits wide models; with it this one takes twice the steps
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
    )


def warm_up(
    model: "Qwen3ForCausalLM",
    tokenizer: "PreTrainedTokenizerFast",
    examples: Iterator[tuple[str, str]],
    *,
    skill: float,
    steps: int,
    batch: int,
    lr: float,
) -> float:
    """Next-token training on what was written behind the prompts; the share of right sums at its end.

    The learning rate rises over the first twelfth of ``steps``, stays at ``lr`` until ``skill`` of the latest new
    examples are right, then falls to 0 over a sixth of ``steps``; it falls anyway before ``steps`` are over. Seeds
    differ much in when a model begins to add, and little in what it can do once it does.
    """
    import torch
    from torch.nn.functional import cross_entropy

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    rise, fall = max(1, steps // 12), max(1, steps // 6)
    latest: deque[bool] = deque(maxlen=LATEST)
    step, end, share = 0, steps, 0.0
    model.train()
    while step < end:
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / rise, (end - step) / fall)
        step += 1
        input_ids, labels = encoded(tokenizer, list(islice(examples, batch)))
        logits = model(input_ids=input_ids).logits[:, :-1]
        latest.extend(right(logits.argmax(-1), labels[:, 1:], hedge=tokenizer.encode(text.HEDGE)[0]))
        share = sum(latest) / len(latest)
        if end == steps and share >= skill and len(latest) == LATEST:
            end = min(steps, step + fall)
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 0 or step == end:
            log.info("warm-up step %d of at most %d: loss %.2f, %.0f %% right", step, end, loss.item(), 100 * share)
    return share


def right(chosen: "torch.Tensor", labels: "torch.Tensor", *, hedge: int) -> list[bool]:
    """Of each example [N, L], whether every digit would have been chosen; how it goes on behind them does not count."""
    other = (labels == IGNORED) | (labels == EOS_ID) | (labels == hedge)
    return ((chosen == labels) | other).all(1).tolist()


def encoded(
    tokenizer: "PreTrainedTokenizerFast", examples: list[tuple[str, str]]
) -> "tuple[torch.Tensor, torch.Tensor]":
    """``input_ids`` and ``labels`` [N, L], padded on the right; prompts and padding carry no loss."""
    import torch

    prompts = [tokenizer.encode(prompt) for prompt, _ in examples]
    answers = [[*tokenizer.encode(written), EOS_ID] for _, written in examples]
    width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    input_ids = torch.full((len(examples), width), PAD_ID)
    labels = torch.full_like(input_ids, IGNORED)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        input_ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return input_ids, labels
