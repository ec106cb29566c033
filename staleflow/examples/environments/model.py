# pyright: basic, reportMissingImports=false
# mypy: disable-error-code="no-untyped-call"
"""Builds a small model that has seen the calculator used, for ``configs/environment.toml``. Adapter to transformers.

As ``quickstart.model``: a Qwen3, random at first, and a supervised warm-up that stands in for pretraining. Its text is
whole dialogues, of which a share has a question mark behind the last answer; the reward will not accept those.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from staleflow.examples.built_models import kept
from staleflow.examples.environments.calculator import calculate
from staleflow.examples.quickstart import task
from staleflow.examples.quickstart.model import EOS, PAD, UNKNOWN, shape

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

ROLES = ("<user>", "<tool>", "<assistant>")
CHARACTERS = "0123456789+-=?"
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
IGNORED = -100


@kept
def build(
    directory: Path,
    seed: int,
    *,
    limit: int = 100,
    hidden: int = 48,
    layers: int = 2,
    heads: int = 4,
    hedged: float = 0.5,
    steps: int = 300,
    batch: int = 32,
    lr: float = 4e-3,
    threads: int = 1,
) -> None:
    """Write model and tokenizer into ``directory``; ``limit`` is the task's, ``threads`` are torch's meanwhile."""
    import torch
    from transformers import Qwen3ForCausalLM

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    try:
        tokenizer = chat_tokenizer()
        model = Qwen3ForCausalLM(shape(tokenizer, hidden, layers, heads))
        warm_up(model, tokenizer, dialogues(task.prompts(seed, limit=limit), seed, hedged), steps, batch, lr)
    finally:
        torch.set_num_threads(before)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def chat_tokenizer() -> "PreTrainedTokenizerFast":
    """One token a character and one a role, with a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate([PAD, EOS, UNKNOWN, *CHARACTERS, *ROLES])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    built = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, unk_token=UNKNOWN)
    built.add_special_tokens({"additional_special_tokens": list(ROLES)})
    built.chat_template = TEMPLATE
    return built


def dialogues(rows: Sequence[dict[str, str]], seed: int, hedged: float) -> Iterator[list[tuple[str, bool]]]:
    """Endless dialogues as pieces of text, each with whether the assistant wrote it."""
    rng = random.Random(seed)
    while True:
        row = rng.choice(rows)
        expression = row["prompt"].rstrip("=")
        answer = row["answer"] + "?" * (rng.random() < hedged)
        yield [
            (f"<user>{row['prompt']}<assistant>", False),
            (f"{expression}{EOS}", True),
            (f"<tool>{calculate(expression)}<assistant>", False),
            (f"{answer}{EOS}", True),
        ]


def warm_up(
    model: "Qwen3ForCausalLM",
    tokenizer: "PreTrainedTokenizerFast",
    examples: Iterator[list[tuple[str, bool]]],
    steps: int,
    batch: int,
    lr: float,
) -> None:
    """Next-token training on what the assistant wrote; the learning rate falls to 0 over the second half."""
    import torch
    from torch.nn.functional import cross_entropy

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    model.train()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / 20, 2 * (1 - step / steps))
        input_ids, labels = encoded(tokenizer, list(islice(examples, batch)))
        logits = model(input_ids=input_ids).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def encoded(
    tokenizer: "PreTrainedTokenizerFast", examples: Sequence[Sequence[tuple[str, bool]]]
) -> "tuple[torch.Tensor, torch.Tensor]":
    """``input_ids`` and ``labels`` [N, L], padded on the right; only the assistant's tokens have labels."""
    import torch

    rows = [[(token, own) for text, own in pieces for token in tokenizer.encode(text)] for pieces in examples]
    width = max(map(len, rows))
    input_ids = torch.tensor([[token for token, _ in row] + [0] * (width - len(row)) for row in rows])
    labels = [[token if own else IGNORED for token, own in row] + [IGNORED] * (width - len(row)) for row in rows]
    return input_ids, torch.tensor(labels)
