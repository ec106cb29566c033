"""The supported subset of the OpenAI calls: request checks and response bodies. Pure functions.

Arguments that would change the distribution of the trained log-probabilities, or that the engine contract does not
support, are rejected by name. Only ``model`` is ignored.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.rollout.engines.base import Sampling
from staleflow.clients.rollout.episodes.chat.template import Message

CHAT = "/chat/completions"
COMPLETIONS = "/completions"
MAX_STOPS = 16

Prompt = list[Message] | str | NDArray[np.int32]
"""Messages of a chat, or the text or tokens of a plain completion."""


class ChatRefused(Exception):
    """A rejected call, answered with an OpenAI-style error; nothing was sampled."""

    def __init__(self, message: str, code: str, *, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.status, self.param = code, status, param

    def body(self) -> dict[str, Any]:
        """Return the response body in the form that the ``openai`` package reads."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """One validated call."""

    prompt: Prompt
    max_tokens: int
    stop: tuple[str, ...]
    """The answer's text ends before the first of these strings; its tokens include the one that completes it."""
    logprobs: bool
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """The result of one call."""

    text: str
    token_ids: list[int]
    tokens: list[str]
    """Text of each token."""
    logprobs: list[float]
    stopped: bool
    """True if a stop token or string ended the answer, False if the limit did."""
    prompt_tokens: int


def parse(route: str, body: object, sampling: Sampling) -> ChatCall:
    """Validate ``body`` as a call of ``route``. ``ChatRefused`` names the first invalid argument."""
    if not isinstance(body, dict):
        raise ChatRefused("the body must be a JSON object", "malformed")
    given = {name: value for name, value in cast(dict[str, Any], body).items() if value is not None}
    prompt = _messages(given.pop("messages", None)) if route == CHAT else _prompt(given.pop("prompt", None))
    limits = [given.pop(name, None) for name in ("max_tokens", "max_completion_tokens")]
    call = ChatCall(
        prompt=prompt,
        max_tokens=_max_tokens(next((limit for limit in limits if limit is not None), None), sampling.max_new_tokens),
        stop=_stop(given.pop("stop", ())),
        logprobs=_logprobs(route, given.pop("logprobs", None)),
        model=str(given.pop("model", "policy")),
    )
    for name, value in given.items():
        _only(name, value, sampling)
    return call


def reply(route: str, call: ChatCall, answer: ChatAnswer, *, number: int, created: int) -> dict[str, Any]:
    """Return the answer in the shape of the OpenAI calls, with the sampled ``token_ids`` added to its choice."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if answer.stopped else "length"}
    if route == CHAT:
        choice["message"] = {"role": "assistant", "content": answer.text}
        choice["logprobs"] = {"content": _chat_logprobs(answer)} if call.logprobs else None
    else:
        choice["text"] = answer.text
        choice["logprobs"] = _plain_logprobs(answer) if call.logprobs else None
    choice["token_ids"] = answer.token_ids
    written = len(answer.token_ids)
    return {
        "id": f"turn-{number}",
        "object": "chat.completion" if route == CHAT else "text_completion",
        "created": created,
        "model": call.model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": written,
            "total_tokens": answer.prompt_tokens + written,
        },
    }


def _chat_logprobs(answer: ChatAnswer) -> list[dict[str, Any]]:
    return [
        {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logprob in zip(answer.tokens, answer.logprobs, strict=True)
    ]


def _plain_logprobs(answer: ChatAnswer) -> dict[str, Any]:
    return {"tokens": answer.tokens, "token_logprobs": answer.logprobs, "top_logprobs": None, "text_offset": []}


def _messages(value: object) -> list[Message]:
    wrong = ChatRefused("messages must be a list of objects with a role, one at least", "malformed", param="messages")
    if not isinstance(value, list) or not value:
        raise wrong
    for message in cast(list[object], value):
        if not isinstance(message, Mapping):
            raise wrong
        fields = cast(Mapping[str, object], message)
        if not isinstance(fields.get("role"), str) or not isinstance(fields.get("content") or "", str | list):
            raise wrong
    return cast(list[Message], value)


def _prompt(value: object) -> str | NDArray[np.int32]:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        items = cast(list[object], value)
        if items and all(type(item) is int and 0 <= item < 2**31 for item in items):
            return np.array(items, np.int32)
    raise ChatRefused("prompt must be one text, or the token ids of one", "malformed", param="prompt")


def _max_tokens(value: object, most: int) -> int:
    if value is None:
        return most
    if type(value) is not int or not 1 <= value <= most:
        message = f"max_tokens is {value!r}; it must be from 1 to rollout.max_new_tokens, {most}"
        raise ChatRefused(message, "malformed", param="max_tokens")
    return value


def _stop(value: object) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else value
    if isinstance(stops, Sequence):
        given = cast(Sequence[object], stops)
        texts = tuple(text for text in given if isinstance(text, str) and text)
        if len(texts) == len(given) <= MAX_STOPS:
            return texts
    message = f"stop must be a text, or at most {MAX_STOPS} of them, none empty"
    raise ChatRefused(message, "malformed", param="stop")


def _logprobs(route: str, value: object) -> bool:
    if route == CHAT and isinstance(value, bool | None):
        return bool(value)
    if route != CHAT and (value is None or (isinstance(value, int) and 0 <= value <= 1)):
        return value is not None and value is not False
    raise ChatRefused(f"logprobs is {value!r}; only the sampled tokens have some", "unsupported", param="logprobs")


def _only(name: str, value: object, sampling: Sampling) -> None:
    """Accept an argument only if it requests the fixed behaviour."""
    allowed: dict[str, object] = {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "top_logprobs": 0,
        "stream": False,
        "echo": False,
        "best_of": 1,
    }
    if name not in allowed:
        raise ChatRefused(f"the argument {name} is not supported here", "unsupported", param=name)
    wanted = allowed[name]
    if not isinstance(value, int | float) or not math.isclose(value, cast(float, wanted), rel_tol=1e-6):
        why = "that of the run, whose log-probabilities are trained" if name == "temperature" else "the only one here"
        raise ChatRefused(f"{name} is {value!r}; it must be {wanted}, {why}", "unsupported", param=name)
