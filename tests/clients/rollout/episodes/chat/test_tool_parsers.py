"""Each family's tool calls are found in its own text, and anything malformed stays content."""

import json

import pytest

from staleflow.clients.rollout.episodes.chat.reasoning import has_reasoning, split_reasoning
from staleflow.clients.rollout.episodes.chat.tool_parsers import PARSERS, tool_parser

ADD = '{"name": "add", "arguments": {"a": 1, "b": {"c": "}"}}}'
ADDED = ("add", {"a": 1, "b": {"c": "}"}})
NOW: tuple[str, dict[str, object]] = ("now", {})


def parsed(name: str, text: str) -> tuple[str, list[tuple[str, object]]]:
    result = PARSERS[name].parse(text)
    return result.content, [(call.name, json.loads(call.arguments)) for call in result.calls]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", f"<tool_call>\n{ADD}\n</tool_call>", "", [ADDED]),
        ("hermes", f"I add.\n<tool_call>{ADD}</tool_call>\n<tool_call>\n{ADD}", "I add.", [ADDED, ADDED]),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [NOW]),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1, "b": {"c": "}"}}}', "", [ADDED]),
        ("llama3_json", f' {ADD}; {{"name": "now", "parameters": {{}}}}', "", [ADDED, NOW]),
        ("llama3_json", f"I add.<|python_tag|>{ADD}", "I add.", [ADDED]),
        ("mistral", f"[TOOL_CALLS] [{ADD}, {ADD}]", "", [ADDED, ADDED]),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": {"c": "}"}}[TOOL_CALLS]now[ARGS]{}', "", [ADDED, NOW]),
        ("mistral", 'I add.[TOOL_CALLS]add[CALL_ID]x1[ARGS]{"a": 1, "b": {"c": "}"}}', "I add.", [ADDED]),
        ("mistral", '[TOOL_CALLS]add{"a": 1, "b": {"c": "}"}}', "", [ADDED]),
    ],
)
def test_calls_are_separated_from_the_content(
    name: str, text: str, content: str, calls: list[tuple[str, object]]
) -> None:
    assert parsed(name, text) == (content, calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "The answer is 12."),
        ("hermes", "<tool_call>add(1, 2)</tool_call>"),
        ("hermes", f"<tool_call>{ADD}</tool_call><tool_call>{ADD[:-3]}</tool_call>"),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        ("llama3_json", "The answer is 12."),
        ("llama3_json", f"{ADD} and then"),
        ("llama3_json", f"{ADD}; 12"),
        ("llama3_json", '<|python_tag|>search.call(query="x")'),
        ("llama3_json", "[" * 100_000),
        ("mistral", "The answer is 12."),
        ("mistral", f"[TOOL_CALLS] [{ADD}, 12]"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{"),
        ("mistral", "[TOOL_CALLS]"),
    ],
)
def test_a_text_without_well_formed_calls_is_content_as_a_whole(name: str, text: str) -> None:
    assert parsed(name, text) == (text, [])


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% for tool in tools %}...<tool_call>{...}</tool_call>", "hermes"),
        ("<|start_header_id|>... respond with {'name': ..., 'parameters': ...}", "llama3_json"),
        ("{{ '[AVAILABLE_TOOLS]' }} [TOOL_CALLS]", "mistral"),
    ],
)
def test_the_chat_template_shows_the_family(template: str, name: str) -> None:
    parser = tool_parser("auto", template)
    assert parser is not None
    assert parser.name == name
    assert tool_parser(name, "") is parser


def test_a_template_of_no_known_family_has_no_parser() -> None:
    for template in ("", "<|im_start|>{{ message.content }}", "<|start_header_id|>", "<tool_call><function=name>"):
        assert tool_parser("auto", template) is None


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nlong\n</think>\n\nshort", False, "long", "short"),
        ("long\n</think>\nshort", True, "long", "short"),
        ("long</think>short", False, "long", "short"),
        ("<think>cut", False, "cut", ""),
        ("cut", True, "cut", ""),
        (" short ", False, "", " short "),
    ],
)
def test_reasoning_is_separated_from_the_content(text: str, opened: bool, reasoning: str, content: str) -> None:
    assert split_reasoning(text, opened=opened) == (reasoning, content)


def test_reasoning_is_split_if_the_template_has_the_tag_or_the_operator_wants_it() -> None:
    assert has_reasoning("auto", "...</think>...")
    assert has_reasoning("think", "")
    assert not has_reasoning("auto", "")
    assert not has_reasoning("none", "...</think>...")
