# pyright: basic, reportMissingImports=false
# mypy: disable-error-code="no-untyped-call"
"""Conversations with tools keep the exact tokens with tokenizers and templates in the formats of three families."""

from typing import Any

import numpy as np
import pytest

from staleflow.clients.rollout.episodes.chat.calls import AssistantMessage, Chat, ToolCall
from staleflow.clients.rollout.episodes.chat.conversation import Conversation
from staleflow.clients.rollout.episodes.chat.refusal import ChatRefused
from staleflow.clients.rollout.episodes.chat.tool_parsers import tool_parser

pytest.importorskip("transformers")

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from staleflow.clients.rollout.episodes.chat.tokenizer import TokenizerChatTemplate

CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "1+1"}

QWEN = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %} "
    "Answer <tool_call>...</tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}</tool_response>"
    "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
LLAMA = (
    "{% macro open(role) %}<|start_header_id|>{{ role }}<|end_header_id|>\n\n{% endmacro %}"
    "{% for m in messages %}{% if loop.first and tools %}{{ open('system') }}Functions, with name and parameters: "
    "{{ tools[0] | tojson }}<|eot_id|>{% endif %}"
    "{% if m.role == 'tool' %}{{ open('ipython') }}{{ m.content }}<|eot_id|>"
    "{% elif m.tool_calls %}{{ open(m.role) }}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "<|eot_id|>{% else %}{{ open(m.role) }}{{ m.content }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ open('assistant') }}{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}"
    "[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }} {{ m.tool_call_id }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}{% if m.tool_calls[0].id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
    "[TOOL_CALLS] {{ m.tool_calls | tojson }}</s>{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
FAMILIES = {
    "hermes": (QWEN, "<|im_end|>", ["<|im_start|>"]),
    "llama3_json": (LLAMA, "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"]),
    "mistral": (MISTRAL, "</s>", ["[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]),
}
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a":1}}\n</tool_call>',
    "llama3_json": '<|python_tag|>{"name": "add", "parameters": {"a":1}}',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a":1}}]',
}
BEHIND = {
    "hermes": "\n<|im_start|>user\n<tool_response>2</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "llama3_json": "<|start_header_id|>ipython<|end_header_id|>\n\n2<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "[TOOL_RESULTS] 2 call00000[/TOOL_RESULTS]",
}


def family(name: str) -> tuple[Any, TokenizerChatTemplate]:
    """Return a tokenizer with one token a character, and the family's special tokens and template."""
    template, eos, special = FAMILIES[name]
    tokenizer = Tokenizer(models.WordLevel({c: n for n, c in enumerate(["<unk>", *CHARACTERS])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    built = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, unk_token="<unk>")
    built.add_special_tokens({"additional_special_tokens": special})
    built.chat_template = template
    return built, TokenizerChatTemplate(built)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tool_call_and_its_result_continue_the_sampled_tokens(name: str) -> None:
    tokenizer, template = family(name)
    parser = tool_parser("auto", template.source)
    assert parser is not None
    assert parser.name == name
    first = Chat(messages=[USER], tools=[ADD])
    conversation = Conversation(template)
    given = conversation.given(first, np.empty(0, np.int32), ended_itself=False)
    assert '"name": "add"' in tokenizer.decode(given.tolist())
    sampled = np.array(tokenizer.encode(WRITTEN[name] + FAMILIES[name][1]), np.int32)
    text = template.text(sampled, keep=parser.markers)
    assert text == WRITTEN[name], "markers are kept, the stop token is not"
    (call,) = parser.parse(text).calls
    assert (call.name, call.arguments) == ("add", '{"a": 1}')
    answer = AssistantMessage(content="", tool_calls=(ToolCall(id="call00000", name="add", arguments='{"a": 1}'),))
    conversation = conversation.extended(first, answer)
    result = {"role": "tool", "tool_call_id": "call00000", "content": "2"}
    second = Chat(messages=[USER, answer.as_message(), result], tools=[ADD])
    so_far = np.concatenate([given, sampled])
    assert tokenizer.decode(conversation.given(second, so_far, ended_itself=True).tolist()) == BEHIND[name]
    # A third call renders the first answer with its tool call from the history.
    conversation = conversation.extended(second, AssistantMessage(content="2"))
    third = Chat(messages=[*second.messages, {"role": "assistant", "content": "2"}, USER], tools=[ADD])
    assert "1+1" in tokenizer.decode(conversation.given(third, so_far, ended_itself=False).tolist())


def test_variables_reach_the_template_and_must_stay_the_same() -> None:
    tokenizer, template = family("hermes")
    chat = Chat(messages=[USER], options={"enable_thinking": False})
    given = Conversation(template).given(chat, np.empty(0, np.int32), ended_itself=False)
    assert tokenizer.decode(given.tolist()).endswith("assistant\n<think></think>")
    conversation = Conversation(template).extended(chat, AssistantMessage(content="2"))
    other = Chat(messages=[USER, {"role": "assistant", "content": "2"}, USER])
    with pytest.raises(ChatRefused, match="chat_template_kwargs differ from those of the conversation"):
        conversation.given(other, given, ended_itself=False)


def test_a_template_that_ignores_tools_is_refused() -> None:
    tokenizer, template = family("hermes")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ChatRefused, match="the model's chat template ignores tools"):
        Conversation(template).given(Chat(messages=[USER], tools=[ADD]), np.empty(0, np.int32), ended_itself=False)


def test_the_role_developer_is_rendered_as_system() -> None:
    tokenizer, template = family("hermes")
    chat = Chat(messages=[{"role": "developer", "content": "short"}, USER])
    given = Conversation(template).given(chat, np.empty(0, np.int32), ended_itself=False)
    assert tokenizer.decode(given.tolist()).startswith("<|im_start|>system\nshort<|im_end|>")


def test_templates_get_the_arguments_of_a_call_as_an_object() -> None:
    tokenizer, template = family("hermes")
    call = ToolCall(id="1", name="add", arguments='{"a": 1}')
    messages: list[Any] = [
        USER,
        AssistantMessage(content="", tool_calls=(call,)).as_message(),
        {"role": "tool", "content": "2"},
    ]
    given = Conversation(template).given(Chat(messages=messages), np.empty(0, np.int32), ended_itself=False)
    assert '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' in tokenizer.decode(given.tolist())
