"""Hermes and Qwen: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, any number of them."""

import re

from staleflow.clients.rollout.episodes.chat.tool_parsers.base import Parsed, ToolParser, decoded, written_call

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(rf"{OPEN}(.*?)(?:{CLOSE}|\Z)", re.DOTALL)


def parse(text: str) -> Parsed:
    """Split at the tags. The last closing tag may be missing: some models stop right after the object."""
    calls = [written_call(decoded(body.strip()), "arguments", "parameters") for body in _CALL.findall(text)]
    known = tuple(call for call in calls if call is not None)
    if not known or len(known) < len(calls):
        return Parsed(text)
    return Parsed(_CALL.sub("", text).strip(), known)


def recognises(template: str) -> bool:
    # Qwen3-Coder writes <function=name> inside the same tags.
    return OPEN in template and "<function=" not in template


HERMES = ToolParser(name="hermes", markers=(OPEN, CLOSE), recognises=recognises, parse=parse)
