"""Mistral: ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, in newer models ``[TOOL_CALLS]name[ARGS]{…}`` each."""

from staleflow.clients.rollout.episodes.chat.json_values import items
from staleflow.clients.rollout.episodes.chat.tool_parsers.base import (
    Parsed,
    ToolParser,
    WrittenCall,
    decoded,
    written_call,
)

MARKER, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def parse(text: str) -> Parsed:
    """Split at the markers; the content is in front of the first one."""
    content, *bodies = text.split(MARKER)
    calls: list[WrittenCall] = []
    for body in bodies:
        written = _array(body) if body.lstrip().startswith("[{") else _named(body)
        if not written:
            return Parsed(text)
        calls += written
    return Parsed(content.strip(), tuple(calls)) if calls else Parsed(text)


def _array(body: str) -> list[WrittenCall]:
    """Return the calls of a JSON array; empty if one is malformed."""
    values = items(decoded(body.strip())) or []
    calls = [written_call(value, "arguments", "parameters") for value in values]
    known = [call for call in calls if call is not None]
    return known if len(known) == len(calls) else []


def _named(body: str) -> list[WrittenCall]:
    """Return the call whose name precedes its arguments; the model's own id between them is dropped."""
    name, mark, arguments = body.partition(ARGUMENTS)
    if not mark:
        name, brace, rest = body.partition("{")
        arguments = brace + rest
    call = written_call(
        {"name": name.partition(CALL_ID)[0].strip(), "arguments": decoded(arguments.strip())}, "arguments"
    )
    return [call] if call is not None else []


def recognises(template: str) -> bool:
    return MARKER in template


MISTRAL = ToolParser(name="mistral", markers=(MARKER, ARGUMENTS, CALL_ID), recognises=recognises, parse=parse)
