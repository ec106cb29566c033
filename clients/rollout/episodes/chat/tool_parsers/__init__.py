"""Tool calls in the text of an answer, one module for each family of models."""

from staleflow.clients.rollout.episodes.chat.tool_parsers.base import Parsed, ToolParser
from staleflow.clients.rollout.episodes.chat.tool_parsers.hermes import HERMES
from staleflow.clients.rollout.episodes.chat.tool_parsers.llama3_json import LLAMA3_JSON
from staleflow.clients.rollout.episodes.chat.tool_parsers.mistral import MISTRAL

__all__ = ["PARSERS", "Parsed", "ToolParser", "tool_parser"]

PARSERS = {parser.name: parser for parser in (HERMES, MISTRAL, LLAMA3_JSON)}


def tool_parser(name: str, template: str) -> ToolParser | None:
    """Return the parser ``name``; for "auto" the one that recognises the chat template, or None."""
    if name != "auto":
        return PARSERS[name]
    return next((parser for parser in PARSERS.values() if parser.recognises(template)), None)
