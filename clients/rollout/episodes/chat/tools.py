"""Validation of ``tools`` and ``tool_choice``. Choices that cannot be enforced while sampling are rejected by name."""

from staleflow.clients.rollout.episodes.chat.json_values import fields, items
from staleflow.clients.rollout.episodes.chat.refusal import ChatRefused, malformed, unsupported
from staleflow.clients.rollout.episodes.chat.template import Tool

FORM = 'it must be a list of {"type": "function", "function": {"name": ..., "parameters": {...}}}'
UNENFORCED = "the policy decides while it samples freely, so a call cannot be enforced; allowed are auto and none"


def parse_tools(value: object) -> list[Tool]:
    """Return the tools; empty for None or an empty list."""
    if value is None:
        return []
    given = items(value)
    if given is None:
        raise malformed("tools", value, FORM)
    tools = [_tool(f"tools[{number}]", tool) for number, tool in enumerate(given)]
    names = [tool["function"]["name"] for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ChatRefused(f"tools has two functions named {twice!r}; names must differ", "malformed", param="tools")
    return tools


def _tool(param: str, value: object) -> Tool:
    function = fields(fields(value).get("function"))
    name, parameters = function.get("name"), function.get("parameters")
    wrong_type = fields(value).get("type", "function") != "function"
    if wrong_type or not isinstance(name, str) or not name or not isinstance(parameters, dict | None):
        raise malformed(param, value, FORM)
    return {"type": "function", "function": {key: field for key, field in function.items() if field is not None}}


def parses_calls(choice: object, tools: list[Tool]) -> bool:
    """Return whether calls are parsed: not for ``none``, whose answer is text as it was written."""
    if choice is None:
        return bool(tools)
    if choice not in ("auto", "none"):
        raise unsupported("tool_choice", choice, UNENFORCED)
    return bool(tools) and choice == "auto"
