"""Llama 3.1 to 3.3: the answer is ``{"name": …, "parameters": {…}}``, several are separated by semicolons.

Calls of built-in tools, ``<|python_tag|>search.call(query="…")``, are not parsed: they are content.
"""

import json

from staleflow.clients.rollout.episodes.chat.tool_parsers.base import Parsed, ToolParser, WrittenCall, written_call

PYTHON_TAG = "<|python_tag|>"
_DECODER = json.JSONDecoder()


def parse(text: str) -> Parsed:
    """Parse the whole text, or the text after ``<|python_tag|>``, as calls."""
    before, tag, after = text.partition(PYTHON_TAG)
    content, rest = (before.strip(), after) if tag else ("", text)
    calls = _calls(rest.strip())
    return Parsed(content, calls) if calls else Parsed(text)


def _calls(text: str) -> tuple[WrittenCall, ...]:
    """Return all calls; empty if anything else is among them."""
    calls: list[WrittenCall] = []
    while text:
        try:
            value, end = _DECODER.raw_decode(text)
        except (ValueError, RecursionError):
            return ()
        call, rest = written_call(value, "parameters", "arguments"), text[end:].lstrip()
        if call is None or (rest and not rest.startswith(";")):
            return ()
        calls.append(call)
        text = rest[1:].lstrip()
    return tuple(calls)


def recognises(template: str) -> bool:
    return "<|start_header_id|>" in template and ("parameters" in template or PYTHON_TAG in template)


LLAMA3_JSON = ToolParser(name="llama3_json", markers=(PYTHON_TAG,), recognises=recognises, parse=parse)
