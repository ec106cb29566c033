"""The ``anthropic`` package talks to an episode: tools, thinking, streams and rejections."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.clients.rollout.episodes.agents import Scene, episode

package: Any = pytest.importorskip("anthropic")

ADD: Any = {"name": "add", "description": "Add.", "input_schema": {"type": "object"}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
HELLO: Any = {"role": "user", "content": "hello"}


@asynccontextmanager
async def anthropic(*texts: str, **settings: Any) -> AsyncGenerator[tuple[Any, Scene]]:
    async with (
        episode(*texts, **settings) as scene,
        package.AsyncAnthropic(base_url=scene.anthropic_base_url, api_key=scene.key, max_retries=0) as client,
    ):
        yield client, scene


async def test_a_tool_is_called_and_its_result_read_after_the_sampled_tokens() -> None:
    async with anthropic(f"<think>hm</think>so {CALL}", "It is 2.") as (client, scene):
        messages: list[Any] = [HELLO]
        reply = await client.messages.create(model="m", max_tokens=100, system="s", messages=messages, tools=[ADD])
        assert [block.type for block in reply.content] == ["thinking", "text", "tool_use"]
        call = reply.content[2]
        assert (reply.stop_reason, call.name, call.input) == ("tool_use", "add", {"a": 1})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "2"}]}
        messages += [
            {"role": "assistant", "content": reply.content},
            {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
        ]
        reply = await client.messages.create(model="m", max_tokens=100, system="s", messages=messages, tools=[ADD])
        assert (reply.stop_reason, reply.content[0].text) == (
            "end_turn",
            "It is 2.",
        )
        assert reply.usage.output_tokens == len("It is 2.\0")
        assert scene.trained() == [
            ("tool: add\nsystem: s\nuser: hello\nassistant: ", f"<think>hm</think>so {CALL}\0"),
            ("\ntool: 2\nuser: go on\nassistant: ", "It is 2.\0"),
        ]


async def test_a_stream_assembles_to_the_same_message() -> None:
    async with anthropic(f"<think>hm</think>so {CALL}") as (client, scene):
        async with client.messages.stream(model="m", max_tokens=100, messages=[HELLO], tools=[ADD]) as stream:
            texts = [text async for text in stream.text_stream]
            message = await stream.get_final_message()
        assert texts == ["so"]
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        assert message.content[2].input == {"a": 1}
        assert message.stop_reason == "tool_use"
        assert message.usage.output_tokens == len(scene.trained()[0][1])


async def test_a_stop_sequence_and_the_limit_are_named() -> None:
    async with anthropic("one. two.", "three") as (client, _):
        reply = await client.messages.create(model="m", max_tokens=100, messages=[HELLO], stop_sequences=["."])
        assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", ".")
        messages: list[Any] = [HELLO, {"role": "assistant", "content": reply.content}, HELLO]
        reply = await client.messages.create(model="m", max_tokens=3, messages=messages)
        assert (reply.stop_reason, reply.content[0].text) == ("max_tokens", "thr")


REJECTED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [ADD], "tool_choice": {"type": "any"}}, "allowed are auto and none"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "it must be {'type': 'disabled'}"),
    ({"extra_body": {"temperature": 0.5}}, "temperature is 0.5; it must be 1.0"),
    ({"extra_body": {"top_k": 5}}, "top_k is 5; it must be -1"),
    ({"max_tokens": 2000}, "max_tokens is 2000; it must be from 1 to rollout.max_new_tokens, 1000"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "content block of type 'image'",
    ),
    (
        {"messages": [{"role": "robot", "content": "x"}]},
        "messages[0].role is 'robot'; it must be user or assistant",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), REJECTED)
async def test_a_rejection_names_argument_value_and_what_is_allowed(arguments: dict[str, Any], message: str) -> None:
    async with anthropic() as (client, scene):
        with pytest.raises(package.BadRequestError) as rejected:
            await client.messages.create(**{"model": "m", "max_tokens": 10, "messages": [HELLO], **arguments})
        assert message in str(rejected.value)
        assert scene.engine.requests == []


async def test_another_key_is_an_authentication_error_of_the_package() -> None:
    async with anthropic() as (client, _):
        with pytest.raises(package.AuthenticationError):
            await client.with_options(api_key="x").messages.create(model="m", max_tokens=10, messages=[HELLO])


async def test_the_one_model_is_listed() -> None:
    async with anthropic() as (client, _):
        assert [model.id async for model in client.models.list()] == ["policy"]
