"""``/v1/messages``: the Anthropic call, converted to a conversation with OpenAI messages, its reply and its stream."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from staleflow.clients.rollout.episodes.chat.apis.arguments import Arguments
from staleflow.clients.rollout.episodes.chat.apis.events import named_event
from staleflow.clients.rollout.episodes.chat.calls import Answer, Call, Chat, Choice, Ended, Limits
from staleflow.clients.rollout.episodes.chat.json_values import fields, items
from staleflow.clients.rollout.episodes.chat.refusal import ChatRefused, malformed, unsupported
from staleflow.clients.rollout.episodes.chat.template import Message, Tool
from staleflow.clients.rollout.episodes.chat.tools import UNENFORCED, parse_tools, parses_calls

STOP_REASONS: Final[Mapping[Ended, str]] = {
    "token": "end_turn",
    "string": "stop_sequence",
    "length": "max_tokens",
    "tools": "tool_use",
}


EMPTY_BLOCKS: Final[Mapping[str, Mapping[str, Any]]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}
"""Fields of a block at its start in a stream."""

TOOL_FORM = '{"name": ..., "input_schema": {...}}'


def parse(body: object, limits: Limits) -> Call:
    """Validate the body. ``ChatRefused`` names the first invalid argument."""
    arguments = Arguments(body)
    tools = _tools(arguments.take("tools"))
    stream, _ = arguments.stream()
    if not limits.override:
        arguments.only("thinking", {"type": "disabled"}, why="since the chat template decides about reasoning")
    arguments.take("thinking")
    system, messages = arguments.take("system"), arguments.take("messages")
    call = Call(
        prompt=Chat(messages=[*_system(system), *_messages(messages)], tools=tools),
        max_tokens=arguments.max_tokens(limits, "max_tokens"),
        model=str(arguments.take("model") or "policy"),
        stop=arguments.stop("stop_sequences"),
        parse_tools=_parses_calls(arguments.take("tool_choice"), tools, limits),
        stream=stream,
    )
    arguments.check_rest(limits)
    return call


def _tools(value: object) -> list[Tool]:
    """Convert client tools; tools that Anthropic's servers run do not exist here."""
    given = items(value)
    if given is None:
        if value is None:
            return []
        raise malformed("tools", value, f"it must be a list of {TOOL_FORM}")
    converted: list[dict[str, Any]] = []
    for number, tool in enumerate(map(fields, given)):
        if tool.get("type", "custom") != "custom" or not isinstance(tool.get("name"), str):
            raise malformed(f"tools[{number}]", given[number], f"it must be {TOOL_FORM}")
        function = {
            "name": tool["name"],
            "description": tool.get("description"),
            "parameters": tool.get("input_schema"),
        }
        converted.append({"type": "function", "function": function})
    return parse_tools(converted)


def _parses_calls(value: object, tools: list[Tool], limits: Limits) -> bool:
    if value is None:
        return parses_calls(None, tools)
    choice = fields(value)
    if choice.get("type") not in ("auto", "none"):
        raise unsupported("tool_choice", value, UNENFORCED)
    if choice.get("disable_parallel_tool_use") and not limits.override:
        raise unsupported("tool_choice", value, "the number of calls cannot be enforced")
    return parses_calls(choice["type"], tools)


def _system(value: object) -> Iterator[Message]:
    if value is not None:
        blocks = _blocks("system", value)
        yield {"role": "system", "content": "".join(_text("system", block) for block in blocks)}


def _messages(value: object) -> Iterator[Message]:
    form = "it must be a list of objects with a role (user or assistant) and content, one at least"
    given = items(value)
    if not given:
        raise malformed("messages", value, form)
    for number, message in enumerate(map(fields, given)):
        param = f"messages[{number}]"
        blocks = _blocks(param, message.get("content"))
        match message.get("role"):
            case "user":
                yield from _user(param, blocks)
            case "assistant":
                yield _assistant(param, blocks)
            case role:
                raise malformed(f"{param}.role", role, "it must be user or assistant")


def _user(param: str, blocks: list[Mapping[str, Any]]) -> Iterator[Message]:
    """Results of tools become messages of their own, in front of the text."""
    texts: list[str] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            content = "".join(_text(param, inner) for inner in _blocks(param, block.get("content") or ""))
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
        else:
            texts.append(_text(param, block))
    if texts:
        yield {"role": "user", "content": "".join(texts)}


def _assistant(param: str, blocks: list[Mapping[str, Any]]) -> Message:
    message: dict[str, Any] = {"role": "assistant"}
    calls: list[dict[str, Any]] = []
    for block in blocks:
        match block.get("type"):
            case "thinking":
                message["reasoning_content"] = str(block.get("thinking"))
            case "tool_use":
                function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case _:
                message["content"] = message.get("content", "") + _text(param, block)
    return {**message, "tool_calls": calls} if calls else message


def _blocks(param: str, value: object) -> list[Mapping[str, Any]]:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    blocks = items(value)
    if blocks is None:
        raise malformed(f"{param}.content", value, "it must be a text or a list of content blocks")
    return [fields(block) for block in blocks]


def _text(param: str, block: Mapping[str, Any]) -> str:
    if block.get("type") != "text" or not isinstance(block.get("text"), str):
        detail = (
            f"{param} has a content block of type {block.get('type')!r}; text, tool_use and tool_result are supported"
        )
        raise ChatRefused(detail, "unsupported_content", param=param)
    return cast(str, block["text"])


def reply(call: Call, answer: Answer) -> dict[str, Any]:
    """Return the reply, with the sampled ``token_ids`` added."""
    choice = answer.choices[0]
    return {
        **_head(call, answer),
        "content": [block for block, _ in _content(choice)],
        **_end(choice),
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens},
        "token_ids": choice.token_ids,
    }


def events(call: Call, answer: Answer) -> Iterator[bytes]:
    """Return the answer as a stream: each block of content with its start, one delta and its stop."""
    choice = answer.choices[0]
    usage = {"input_tokens": answer.prompt_tokens, "output_tokens": 0}
    opening: dict[str, Any] = {
        **_head(call, answer),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }
    yield named_event({"type": "message_start", "message": opening})
    for index, (block, delta) in enumerate(_content(choice)):
        start = {**block, **EMPTY_BLOCKS[block["type"]]}
        yield named_event({"type": "content_block_start", "index": index, "content_block": start})
        yield named_event({"type": "content_block_delta", "index": index, "delta": delta})
        yield named_event({"type": "content_block_stop", "index": index})
    usage = {"output_tokens": answer.completion_tokens}
    yield named_event({"type": "message_delta", "delta": _end(choice), "usage": usage})
    yield named_event({"type": "message_stop"})


def _head(call: Call, answer: Answer) -> dict[str, Any]:
    return {"id": f"turn-{answer.number}", "type": "message", "role": "assistant", "model": call.model}


def _end(choice: Choice) -> dict[str, Any]:
    return {"stop_reason": STOP_REASONS[choice.ended], "stop_sequence": choice.stop}


def _content(choice: Choice) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Return each block of content with the delta that streams it."""
    message = choice.message
    if message.reasoning:
        thinking = {"thinking": message.reasoning}
        yield {"type": "thinking", **thinking, "signature": ""}, {"type": "thinking_delta", **thinking}
    if message.content or not message.tool_calls:
        text = {"text": message.content}
        yield {"type": "text", **text}, {"type": "text_delta", **text}
    for call in message.tool_calls:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        yield block, {"type": "input_json_delta", "partial_json": call.arguments}
