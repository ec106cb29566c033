"""``/v1/completions``: the OpenAI call for plain text or tokens, its reply and its stream."""

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.rollout.episodes.chat.apis.arguments import Arguments
from staleflow.clients.rollout.episodes.chat.apis.chat_completions import FINISH, usage
from staleflow.clients.rollout.episodes.chat.apis.events import data_event
from staleflow.clients.rollout.episodes.chat.calls import Answer, Call, Choice, Limits
from staleflow.clients.rollout.episodes.chat.json_values import items
from staleflow.clients.rollout.episodes.chat.refusal import malformed, unsupported


def parse(body: object, limits: Limits) -> Call:
    """Validate the body. ``ChatRefused`` names the first invalid argument."""
    arguments = Arguments(body)
    stream, include_usage = arguments.stream()
    arguments.only("echo", False)
    arguments.only("best_of", 1)
    arguments.only("suffix", "")
    call = Call(
        prompt=_prompt(arguments.take("prompt")),
        max_tokens=arguments.max_tokens(limits, "max_tokens"),
        model=str(arguments.take("model") or "policy"),
        n=arguments.choices(limits),
        stop=arguments.stop("stop"),
        logprobs=_logprobs_requested(arguments.take("logprobs")),
        stream=stream,
        include_usage=include_usage,
    )
    arguments.check_rest(limits)
    return call


def _prompt(value: object) -> str | NDArray[np.int32]:
    if isinstance(value, str):
        return value
    tokens = items(value)
    if tokens and all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        return np.array(tokens, np.int32)
    raise malformed("prompt", value, "it must be one text, or the token ids of one")


def _logprobs_requested(value: object) -> bool:
    if value is None or (isinstance(value, int) and 0 <= value <= 1):
        return value is not None and value is not False
    raise unsupported("logprobs", value, "it must be 0 or 1, since only sampled tokens have log-probabilities")


def reply(call: Call, answer: Answer) -> dict[str, Any]:
    """Return the reply, with the sampled ``token_ids`` added to each choice."""
    choices = [_choice(call, index, choice) for index, choice in enumerate(answer.choices)]
    return {**_head(call, answer), "choices": choices, "usage": usage(answer)}


def events(call: Call, answer: Answer) -> Iterator[bytes]:
    """Return the answer as a stream: one event for each choice."""
    head = _head(call, answer)
    for index, choice in enumerate(answer.choices):
        fields: Mapping[str, Any] = {"usage": None} if call.include_usage else {}
        yield data_event({**head, "choices": [_choice(call, index, choice)], **fields})
    if call.include_usage:
        yield data_event({**head, "choices": [], "usage": usage(answer)})
    yield data_event("[DONE]")


def _head(call: Call, answer: Answer) -> dict[str, Any]:
    return {"id": f"turn-{answer.number}", "object": "text_completion", "created": answer.created, "model": call.model}


def _choice(call: Call, index: int, choice: Choice) -> dict[str, Any]:
    return {
        "index": index,
        "text": choice.text,
        "finish_reason": FINISH[choice.ended],
        "logprobs": _logprobs(choice) if call.logprobs else None,
        "token_ids": choice.token_ids,
    }


def _logprobs(choice: Choice) -> dict[str, Any]:
    offsets = list(accumulate((len(token) for token in choice.tokens[:-1]), initial=0))
    return {
        "tokens": choice.tokens,
        "token_logprobs": choice.logprobs,
        "top_logprobs": None,
        "text_offset": offsets,
    }
