"""The ``openai`` package talks to an episode: tools, reasoning, streams, choices, and rejections."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from tests.clients.rollout.engines.waiting import until
from tests.clients.rollout.episodes.agents import Scene, episode

ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
HELLO: Any = {"role": "user", "content": "hello"}


@asynccontextmanager
async def openai(*texts: str, **settings: Any) -> AsyncGenerator[tuple[AsyncOpenAI, Scene]]:
    async with (
        episode(*texts, **settings) as scene,
        AsyncOpenAI(base_url=scene.base_url, api_key=scene.key, max_retries=0) as client,
    ):
        yield client, scene


async def test_a_tool_is_called_and_its_result_read_after_the_sampled_tokens() -> None:
    async with openai(f"<think>\nI add.\n</think>\nLet me see.{CALL}{CALL}", "It is 2.") as (client, scene):
        messages: list[Any] = [{"role": "system", "content": "s"}, HELLO]
        reply = await client.chat.completions.create(model="m", messages=messages, tools=[ADD], tool_choice="auto")
        choice = reply.choices[0]
        message = choice.message
        assert (choice.finish_reason, message.content) == ("tool_calls", "Let me see.")
        assert message.model_extra == {"reasoning_content": "I add."}
        assert message.tool_calls is not None
        assert [(c.id, c.type == "function" and c.function.arguments) for c in message.tool_calls] == [
            ("call00000", '{"a": 1}'),
            ("call00001", '{"a": 1}'),
        ]
        messages += [message, *({"role": "tool", "tool_call_id": c.id, "content": "2"} for c in message.tool_calls)]
        reply = await client.chat.completions.create(model="m", messages=messages, tools=[ADD])
        assert (reply.choices[0].finish_reason, reply.choices[0].message.content) == ("stop", "It is 2.")
        first = f"<think>\nI add.\n</think>\nLet me see.{CALL}{CALL}\0"
        assert scene.trained() == [
            ("tool: add\nsystem: s\nuser: hello\nassistant: ", first),
            ("\ntool: 2\ntool: 2\nassistant: ", "It is 2.\0"),
        ]
        assert scene.prompts[1] == "".join([*scene.trained()[0], scene.trained()[1][0]])


async def test_an_answer_may_come_back_without_reasoning_with_other_ids_and_spacing() -> None:
    async with openai(f"<think>hm</think>so {CALL}", "done") as (client, scene):
        await client.chat.completions.create(model="m", messages=[HELLO], tools=[ADD])
        function = {"name": "add", "arguments": '{"a":1}'}
        mine: Any = {"role": "assistant", "content": " so ", "tool_calls": [{"id": "1", "function": function}]}
        result: Any = {"role": "tool", "tool_call_id": "1", "content": "2"}
        await client.chat.completions.create(model="m", messages=[HELLO, mine, result], tools=[ADD])
        assert scene.trained()[1] == ("\ntool: 2\nassistant: ", "done\0")


async def test_with_tool_choice_none_a_call_stays_text() -> None:
    async with openai(CALL) as (client, _):
        reply = await client.chat.completions.create(model="m", messages=[HELLO], tools=[ADD], tool_choice="none")
        assert (reply.choices[0].message.content, reply.choices[0].message.tool_calls) == (CALL, None)


async def test_a_stream_has_the_parts_of_the_answer_and_the_usage() -> None:
    async with openai(f"<think>hm</think>so {CALL}", "done") as (client, scene):
        stream = await client.chat.completions.create(
            model="m", messages=[HELLO], tools=[ADD], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(scene.trained()[0][1])
        deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
        assert "".join(delta.content or "" for delta in deltas) == "so"
        assert [d.model_extra for d in deltas if d.model_extra] == [{"reasoning_content": "hm"}]
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        assert [(c.index, c.function and (c.function.name, c.function.arguments)) for c in calls] == [
            (0, ("add", '{"a": 1}'))
        ]
        assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "tool_calls"


async def test_the_stream_helper_of_the_package_assembles_a_message() -> None:
    async with openai("a longer answer") as (client, _):
        async with client.chat.completions.stream(model="m", messages=[HELLO]) as stream:
            completion = await stream.get_final_completion()
        assert completion.choices[0].message.content == "a longer answer"


async def test_limits_stops_and_logprobs_are_those_of_the_sampled_tokens() -> None:
    async with openai("abcdef", "one. two.") as (client, scene):
        reply = await client.chat.completions.create(
            model="m", messages=[HELLO], max_completion_tokens=3, logprobs=True, top_logprobs=0
        )
        choice = reply.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("length", "abc")
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [(one.token, one.logprob) for one in choice.logprobs.content] == [("a", -0.5), ("b", -0.5), ("c", -0.5)]
        messages: list[Any] = [HELLO, choice.message, HELLO]
        reply = await client.chat.completions.create(model="m", messages=messages, stop=["!", "."])
        assert (reply.choices[0].finish_reason, reply.choices[0].message.content) == ("stop", "one")
        assert scene.trained()[1][1] == "one."


async def test_plain_completions_have_streams_and_logprobs() -> None:
    async with openai("4", "8") as (client, scene):
        reply = await client.completions.create(model="m", prompt="2+2=", logprobs=1)
        logprobs = reply.choices[0].logprobs
        assert logprobs is not None
        assert (reply.choices[0].text, logprobs.tokens, logprobs.text_offset) == ("4", ["4", ""], [0, 1])
        stream = await client.completions.create(model="m", prompt="2+2=4;4+4=", stream=True)
        assert [chunk.choices[0].text async for chunk in stream] == ["8"]
        assert scene.trained() == [("2+2=", "4\0"), (";4+4=", "8\0")]


async def test_the_one_model_is_listed() -> None:
    async with openai() as (client, _):
        assert [model.id for model in (await client.models.list()).data] == ["policy"]


REJECTED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"tools": [ADD], "tool_choice": "required"}, "tool_choice", "allowed are auto and none"),
    ({"tools": [ADD, ADD]}, "tools", "two functions named 'add'"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]", "it must be a list of"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls", "is False; it must be True"),
    ({"response_format": {"type": "json_object"}}, "response_format", "it must be {'type': 'text'}"),
    ({"temperature": 0.5}, "temperature", "is 0.5; it must be 1.0, the value of the run"),
    ({"top_p": 0.9}, "top_p", "is 0.9; it must be 1"),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "is 0.5; it must be 0.0, the value of the run"),
    ({"presence_penalty": -1}, "presence_penalty", "is -1; it must be 0.0, the value of the run"),
    ({"extra_body": {"top_k": 5}}, "top_k", "is 5; it must be -1"),
    ({"seed": 3}, "seed", "is 3; it must be left out"),
    ({"logit_bias": {"1": 5}}, "logit_bias", "it must be {}"),
    ({"n": 2}, "n", 'with environment.branches = "refuse" it must be 1'),
    ({"n": 17}, "n", "is 17; it must be from 1 to 16"),
    ({"max_tokens": 2000}, "max_tokens", "is 2000; it must be from 1 to rollout.max_new_tokens, 1000"),
    ({"logprobs": True, "top_logprobs": 5}, "top_logprobs", "is 5; it must be 0"),
    ({"stop": [""]}, "stop", "none empty"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "it must be"),
    ({"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}}, "chat_template_kwargs", "no template variable"),
    ({"extra_body": {"chat_template_kwargs": []}}, "chat_template_kwargs", "it must be an object"),
    ({"extra_body": {"best_of": 2}}, "best_of", "the argument best_of is not supported here"),
    ({"messages": [HELLO, {"role": "assistant", "content": "x"}]}, None, "the policy writes the next answer"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}, HELLO]}, "tool_calls", "it must be a list"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None, "parts that are not text"),
]


@pytest.mark.parametrize(("arguments", "param", "message"), REJECTED)
async def test_a_rejection_names_argument_value_and_what_is_allowed(
    arguments: dict[str, Any], param: str | None, message: str
) -> None:
    async with openai() as (client, scene):
        create: Any = client.chat.completions.create
        with pytest.raises(BadRequestError) as rejected:
            await create(**{"model": "m", "messages": [HELLO], **arguments})
        assert rejected.value.param == param
        assert message in str(rejected.value)
        assert "\n" not in str(rejected.value)
        assert scene.engine.requests == []


async def test_without_a_known_format_tools_are_rejected() -> None:
    async with openai(tool_parser="auto") as (client, _):
        with pytest.raises(
            BadRequestError, match=r"set environment\.tool_parser to one of hermes, mistral, llama3_json"
        ):
            await client.chat.completions.create(model="m", messages=[HELLO], tools=[ADD])


async def test_sampling_arguments_of_an_agent_can_be_replaced_by_those_of_the_run() -> None:
    async with openai("hi", sampling_arguments="override") as (client, scene):
        await client.chat.completions.create(
            model="m", messages=[HELLO], temperature=0.2, top_p=0.9, seed=3, max_tokens=5000, parallel_tool_calls=False
        )
        sampling = scene.engine.requests[0].sampling
        assert (sampling.temperature, sampling.max_new_tokens) == (1.0, 1000)


async def test_a_call_may_name_the_penalties_of_the_run() -> None:
    penalties: Any = {"frequency_penalty": 0.5, "presence_penalty": -1.0}
    async with openai("hi", sampling=penalties) as (client, scene):
        await client.chat.completions.create(model="m", messages=[HELLO], **penalties)
        sampling = scene.engine.requests[0].sampling
        assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.5, -1.0)
        with pytest.raises(BadRequestError, match=r"frequency_penalty is 0; it must be 0\.5, the value of the run"):
            await client.chat.completions.create(model="m", messages=[HELLO], frequency_penalty=0)


async def test_other_tools_are_another_conversation() -> None:
    async with openai("hi", "ho") as (client, _):
        reply = await client.chat.completions.create(model="m", messages=[HELLO], tools=[ADD])
        messages: list[Any] = [HELLO, reply.choices[0].message, HELLO]
        with pytest.raises(BadRequestError, match="tools differ from those of the conversation so far") as rejected:
            await client.chat.completions.create(model="m", messages=messages)
        assert rejected.value.code == "other_history"


async def choose(branches: str) -> list[tuple[str, str]]:
    """Ask for two choices, continue the second, begin another conversation, and return the trained turns."""
    async with openai("one", "two", "more", "side", branches=branches) as (client, scene):
        reply = await client.chat.completions.create(model="m", messages=[HELLO], n=2)
        assert [choice.message.content for choice in reply.choices] == ["one", "two"]
        assert scene.engine.requests[0].seed != scene.engine.requests[1].seed
        messages: list[Any] = [HELLO, reply.choices[1].message, HELLO]
        await client.chat.completions.create(model="m", messages=messages)
        assert scene.prompts[2] == "user: hello\nassistant: two\0\nuser: hello\nassistant: "
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "summarise"}])
        assert scene.prompts[3] == "user: summarise\nassistant: "
        return scene.trained()


async def test_of_several_conversations_the_first_or_the_last_is_trained() -> None:
    assert await choose("first") == [("user: hello\nassistant: ", "one\0")]
    assert await choose("last") == [("user: summarise\nassistant: ", "side\0")]


async def test_an_edited_history_continues_from_the_exact_tokens_of_what_is_unchanged() -> None:
    async with openai("one", "two", "other", branches="last") as (client, scene):
        reply = await client.chat.completions.create(model="m", messages=[HELLO])
        first: list[Any] = [HELLO, reply.choices[0].message]
        await client.chat.completions.create(model="m", messages=[*first, HELLO])
        again: Any = {"role": "user", "content": "again"}
        await client.chat.completions.create(model="m", messages=[*first, again])
        assert scene.trained() == [
            ("user: hello\nassistant: ", "one\0"),
            ("\nuser: again\nassistant: ", "other\0"),
        ]


async def test_calls_in_progress_at_once_need_branches() -> None:
    for branches, rejected in (("refuse", 1), ("first", 0)):
        async with openai("one", "two", branches=branches) as (client, scene):
            scene.engine.released.clear()
            create: Any = client.chat.completions.create
            calls = [asyncio.ensure_future(create(model="m", messages=[HELLO])) for _ in range(2)]
            await until(lambda scene=scene, n=2 - rejected: len(scene.engine.requests) == n)  # type: ignore[misc]
            if rejected:
                await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            scene.engine.released.set()
            ended = await asyncio.gather(*calls, return_exceptions=True)
            errors = [one for one in ended if isinstance(one, BadRequestError)]
            assert [error.code for error in errors] == ["busy"] * rejected
            assert len(scene.trained()) == 1


async def test_after_an_interrupt_the_episode_is_over() -> None:
    async with openai("one", "two") as (client, scene):
        reply = await client.chat.completions.create(model="m", messages=[HELLO])
        scene.episode.interrupt()
        assert scene.episode.over.is_set()
        messages: list[Any] = [HELLO, reply.choices[0].message, HELLO]
        with pytest.raises(BadRequestError) as rejected:
            await client.chat.completions.create(model="m", messages=messages, stream=True)
        assert rejected.value.code == "episode_over"
