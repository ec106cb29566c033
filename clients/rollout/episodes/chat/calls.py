"""One call of an agent and its answer, independent of the API that the agent uses. ``apis/`` converts both."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.rollout.engines.base import Sampling
from staleflow.clients.rollout.episodes.chat.template import Message, Tool

MAX_CHOICES = 16
"""Maximum ``n``: each choice takes a row of the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of the calls of a run."""

    sampling: Sampling
    """The run's own sampling, whose log-probabilities are trained."""
    override: bool = False
    """Replace sampling arguments by the run's instead of rejecting them (``environment.sampling_arguments``)."""
    branches: bool = False
    """True if ``environment.branches`` allows more than one conversation, and therefore ``n`` above 1."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chat:
    """A conversation up to the next answer."""

    messages: list[Message]
    tools: list[Tool] = field(default_factory=list[Tool])
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """``chat_template_kwargs``."""


Prompt = Chat | str | NDArray[np.int32]
"""A conversation, or the text or tokens of a plain completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One validated call."""

    prompt: Prompt
    max_tokens: int
    model: str = "policy"
    n: int = 1
    stop: tuple[str, ...] = ()
    """The answer's text ends before the first of these strings; its tokens include the one that completes it."""
    parse_tools: bool = False
    """Return tool calls apart from the text."""
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    """Add the usage to the end of a stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool that the policy wrote."""

    id: str
    name: str
    arguments: str
    """A JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantMessage:
    """An answer as message of a conversation."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def as_message(self) -> dict[str, Any]:
        """Return the message of the OpenAI calls; fields without content are left out, except ``content``."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.tool_calls else "")}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


Ended = Literal["token", "string", "length", "tools"]
"""End of an answer: a stop token, a stop string, the limit or an interrupt, or a stop token after tool calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of the ``n`` answers to a call."""

    message: AssistantMessage
    text: str
    """The whole text, reasoning and tool calls included."""
    ended: Ended
    token_ids: list[int]
    stop: str | None = None
    """The stop string that ended the answer."""
    tokens: list[str] = field(default_factory=list[str])
    """Text of each token, if the call requests log-probabilities."""
    logprobs: list[float] = field(default_factory=list[float])


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of one call."""

    number: int
    """Number of the call in its episode, from 1."""
    created: int
    """Seconds since the epoch."""
    prompt_tokens: int
    choices: list[Choice]

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)
