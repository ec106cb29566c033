"""``/v1/chat/completions``: the OpenAI chat call, its reply and its stream."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from staleflow.clients.rollout.episodes.chat.apis.arguments import Arguments
from staleflow.clients.rollout.episodes.chat.apis.events import data_event
from staleflow.clients.rollout.episodes.chat.calls import Answer, Call, Chat, Choice, Ended, Limits
from staleflow.clients.rollout.episodes.chat.json_values import fields, items
from staleflow.clients.rollout.episodes.chat.refusal import malformed, unsupported
from staleflow.clients.rollout.episodes.chat.template import Message
from staleflow.clients.rollout.episodes.chat.tools import parse_tools, parses_calls

FINISH: Final[Mapping[Ended, str]] = {"token": "stop", "string": "stop", "length": "length", "tools": "tool_calls"}

TEMPLATE_ARGUMENTS = frozenset(
    {"conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}
    | {"tokenize", "padding", "truncation", "max_length", "tokenizer_kwargs"}
    | {"return_tensors", "return_dict", "return_assistant_tokens_mask"}
)
"""Arguments of ``apply_chat_template`` itself, which are no variables of the template."""


def parse(body: object, limits: Limits) -> Call:
    """Validate the body. ``ChatRefused`` names the first invalid argument."""
    arguments = Arguments(body)
    tools = parse_tools(arguments.take("tools"))
    stream, include_usage = arguments.stream()
    arguments.only("response_format", {"type": "text"}, why="since tokens are sampled without a grammar")
    if not limits.override:
        arguments.only("parallel_tool_calls", True, why="since the number of calls cannot be enforced")
    arguments.take("parallel_tool_calls")
    arguments.only("top_logprobs", 0, why="since only sampled tokens have log-probabilities")
    call = Call(
        prompt=Chat(
            messages=parse_messages(arguments.take("messages")),
            tools=tools,
            options=_template_options(arguments.take("chat_template_kwargs")),
        ),
        max_tokens=arguments.max_tokens(limits, "max_tokens", "max_completion_tokens"),
        model=str(arguments.take("model") or "policy"),
        n=arguments.choices(limits),
        stop=arguments.stop("stop"),
        parse_tools=parses_calls(arguments.take("tool_choice"), tools),
        logprobs=arguments.flag("logprobs"),
        stream=stream,
        include_usage=include_usage,
    )
    arguments.check_rest(limits)
    return call


def parse_messages(value: object) -> list[Message]:
    wrong = malformed("messages", value, "it must be a list of objects with a role, one at least")
    messages = items(value)
    if not messages:
        raise wrong
    for message in map(fields, messages):
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str | list | None):
            raise wrong
        _check_tool_calls(message.get("tool_calls"))
    return cast(list[Message], messages)


def _check_tool_calls(value: object) -> None:
    form = 'it must be a list of {"id": ..., "function": {"name": ..., "arguments": ...}}'
    calls = items(value)
    if value is not None and calls is None:
        raise malformed("tool_calls", value, form)
    if not all(isinstance(fields(fields(call).get("function")).get("name"), str) for call in calls or ()):
        raise malformed("tool_calls", value, form)


def _template_options(value: object) -> Mapping[str, Any]:
    if value is None:
        return {}
    options = fields(value)
    if options != value:
        raise malformed("chat_template_kwargs", value, "it must be an object of variables for the chat template")
    if own := sorted(options.keys() & TEMPLATE_ARGUMENTS):
        raise unsupported("chat_template_kwargs", value, f"it must not have {own[0]}, which is no template variable")
    return options


def reply(call: Call, answer: Answer) -> dict[str, Any]:
    """Return the reply, with the sampled ``token_ids`` added to each choice."""
    choices = [
        {
            "index": index,
            "finish_reason": FINISH[choice.ended],
            "message": choice.message.as_message(),
            "logprobs": {"content": _logprobs(choice)} if call.logprobs else None,
            "token_ids": choice.token_ids,
        }
        for index, choice in enumerate(answer.choices)
    ]
    return {**_head(call, answer, "chat.completion"), "choices": choices, "usage": usage(answer)}


def events(call: Call, answer: Answer) -> Iterator[bytes]:
    """Return the answer as a stream: per choice its role, reasoning, content, tool calls, and end."""
    head = _head(call, answer, "chat.completion.chunk")

    def chunk(index: int, delta: Mapping[str, Any], **fields: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
        return data_event({**head, "choices": [choice], **({"usage": None} if call.include_usage else {})})

    for index, choice in enumerate(answer.choices):
        message = choice.message
        yield chunk(index, {"role": "assistant", "content": ""})
        if message.reasoning:
            yield chunk(index, {"reasoning_content": message.reasoning})
        if message.content or call.logprobs:
            logprobs = {"content": _logprobs(choice)} if call.logprobs else None
            yield chunk(index, {"content": message.content}, logprobs=logprobs)
        for number, written in enumerate(message.as_message().get("tool_calls", ())):
            yield chunk(index, {"tool_calls": [{"index": number, **written}]})
        yield chunk(index, {}, finish_reason=FINISH[choice.ended], token_ids=choice.token_ids)
    if call.include_usage:
        yield data_event({**head, "choices": [], "usage": usage(answer)})
    yield data_event("[DONE]")


def usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _head(call: Call, answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": f"turn-{answer.number}", "object": kind, "created": answer.created, "model": call.model}


def _logprobs(choice: Choice) -> list[dict[str, Any]]:
    return [
        {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logprob in zip(choice.tokens, choice.logprobs, strict=True)
    ]
