# pyright: basic, reportMissingImports=false
# mypy: disable-error-code="no-untyped-call"
"""Small models, their weights as published, and the log-probabilities that the trainer would compute."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers.generation import logits_process as reference

from staleflow.clients.models.likelihood import token_logprobs
from staleflow.clients.rollout.engines.base import Sampling

VOCABULARY = 61
STOP = 3
CONTEXT = 512


def build(kind: str = "qwen3", seed: int = 0, dtype: str = "float32") -> Any:
    """Build a model far from uniform, so that a wrong mask, position, scale or weight shows."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.3,
        "eos_token_id": STOP,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    config: Any
    match kind:
        case "llama":
            config = transformers.LlamaConfig(**sizes, tie_word_embeddings=False)
        case "qwen3_moe":
            experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
            config = transformers.Qwen3MoeConfig(**sizes, **experts, tie_word_embeddings=False)
        case _:
            config = transformers.Qwen3Config(**sizes, tie_word_embeddings=True)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


def save(model: Any, directory: Path, words: int = VOCABULARY) -> Path:
    """Save a model directory, with a tokenizer of ``words`` words."""
    model.save_pretrained(directory)
    special = ["<pad>", "<bos>", "<unk>", "<eos>"]
    vocabulary = {word: number for number, word in enumerate([*special, *map(chr, range(97, 97 + words - 4))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(directory)
    return directory


def published(model: Any) -> dict[str, Any]:
    """Return the weights as a reader of the parameter server receives them."""
    state = model.state_dict()
    return {
        name: (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).detach().numpy().copy()
        for name, tensor in state.items()
    }


def step(model: Any, seed: int) -> None:
    """Change every weight slightly, as an optimizer would."""
    torch.manual_seed(1000 + seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))


def trainer_logprobs(model: Any, prompt: list[int], token_ids: Any, temperature: float = 1.0) -> Any:
    """Log-probabilities of a completion by the trainer's own forward pass."""
    sequence = torch.tensor([[*prompt, *np.asarray(token_ids).tolist()]])
    with torch.inference_mode():
        logprobs = token_logprobs(model(input_ids=sequence).logits, sequence, temperature)
    return logprobs[0, len(prompt) :].numpy()


def over_kept_cache(old: Any, new: Any, prompt: list[int], written: Any, token_ids: Any) -> Any:
    """Log-probabilities of ``token_ids`` by the new weights over the old weights' keys and values."""
    cache = transformers.DynamicCache()
    sequence = torch.tensor([[*prompt, *np.asarray(written).tolist(), *np.asarray(token_ids).tolist()]])
    seen = len(prompt) + len(written) - 1  # the old weights drew the last token and the new weights read it
    with torch.inference_mode():
        old(input_ids=sequence[:, :seen], past_key_values=cache, use_cache=True)
        logits = new(input_ids=sequence[:, seen:-1], past_key_values=cache, use_cache=True).logits[0]
    chosen = torch.tensor(np.asarray(token_ids), dtype=torch.int64)[:, None]
    return logits.float().log_softmax(-1).gather(-1, chosen)[:, 0].numpy()


def prompts(number: int, longest: int = 60, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, VOCABULARY, rng.integers(1, longest)).tolist() for _ in range(number)]


def by_transformers(scores: Any, written: list[int], sampling: Sampling, completion: list[int] | None = None) -> Any:
    """The scores of one row after the processors of ``transformers``, in the engines' order.

    ``completion``: the part of ``written`` that follows the prompt. ``transformers`` has no processor for the penalties
    of its tokens, so they are computed here from OpenAI's formula.
    """
    processors: list[Any] = []
    if sampling.repetition_penalty != 1:
        processors.append(reference.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    counts = torch.bincount(torch.tensor(completion or [], dtype=torch.int64), minlength=len(scores))
    penalties = counts * sampling.frequency_penalty + (counts > 0) * sampling.presence_penalty
    processors.append(lambda _, scores: scores - penalties)
    processors.append(reference.TemperatureLogitsWarper(sampling.temperature))
    if sampling.min_p:
        processors.append(reference.MinPLogitsWarper(sampling.min_p))
    if sampling.top_k:
        processors.append(reference.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(reference.TopPLogitsWarper(sampling.top_p))
    return reference.LogitsProcessorList(processors)(torch.LongTensor([written]), scores[None])[0]


def expected_logprobs(model: Any, prompt: list[int], token_ids: list[int], sampling: Sampling) -> list[float]:
    """The log-probability of each token by one forward pass and the processors of ``transformers``."""
    with torch.inference_mode():
        scores = model(input_ids=torch.tensor([[*prompt, *token_ids]])).logits[0].float()
    found = list[float]()
    for place, token in enumerate(token_ids):
        before = [*prompt, *token_ids[:place]]
        shaped = by_transformers(scores[len(before) - 1], before, sampling, token_ids[:place])
        found.append(float(shaped.log_softmax(-1)[token]))
    return found
