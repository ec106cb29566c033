# pyright: basic, reportMissingImports=false
# mypy: disable-error-code="no-untyped-call"
"""Build a small model that has seen tool calls in the Hermes format, for ``configs/agent.toml``.

Like ``model.py``: a Qwen3 with random weights and a supervised warm-up that stands in for pretraining. A share of its
dialogues has a question mark behind the answer, which the reward does not accept. Adapter to transformers.
"""

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from staleflow.examples.built_models import kept
from staleflow.examples.environments.calculator import calculate
from staleflow.examples.environments.model import CHARACTERS, ROLES, warm_up
from staleflow.examples.quickstart import task
from staleflow.examples.quickstart.model import EOS, PAD, UNKNOWN, shape

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOOLS = "<tools>calculator"
CALL = ('<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>')
TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = ("<tool_call>", "</tool_call>", CALL[0].removeprefix("<tool_call>"), '"}}', "<tools>", "calculator")
"""Texts that are one token each."""


@kept
def build(
    directory: Path,
    seed: int,
    *,
    limit: int = 50,
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
        tokenizer = agent_tokenizer()
        model = Qwen3ForCausalLM(shape(tokenizer, hidden, layers, heads))
        warm_up(model, tokenizer, dialogues(task.prompts(seed, limit=limit), seed, hedged), steps, batch, lr)
    finally:
        torch.set_num_threads(before)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def agent_tokenizer() -> "PreTrainedTokenizerFast":
    """Build a tokenizer with a token for each character, role and word, and a chat template that renders tools."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate([PAD, EOS, UNKNOWN, *CHARACTERS, *WORDS, *ROLES])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    words = "|".join(re.escape(word) for word in WORDS)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{words}|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    built = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, unk_token=UNKNOWN)
    built.add_special_tokens({"additional_special_tokens": list(ROLES)})
    built.chat_template = TEMPLATE
    return built


def dialogues(rows: Sequence[dict[str, str]], seed: int, hedged: float) -> Iterator[list[tuple[str, bool]]]:
    """Yield endless dialogues as pieces of text, each with whether the assistant wrote it."""
    rng = random.Random(seed)
    while True:
        row = rng.choice(rows)
        expression = row["prompt"].rstrip("=")
        answer = row["answer"] + "?" * (rng.random() < hedged)
        yield [
            (f"{TOOLS}<user>{row['prompt']}<assistant>", False),
            (f"{CALL[0]}{expression}{CALL[1]}{EOS}", True),
            (f"<tool>{calculate(expression)}<assistant>", False),
            (f"{answer}{EOS}", True),
        ]
