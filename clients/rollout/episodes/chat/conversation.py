"""Token-exact continuation: compute the tokens that a call adds to a conversation. Pure, no engine.

Each call repeats the conversation and extends it, as chat clients do. The next turn's prompt consists of the exact
tokens so far, as they were sampled, and the tokens of the new messages. Sampled text is never tokenized again.

- Chat templates render history in their own way (some omit earlier reasoning, or trim). This does not matter here,
  since the rendered history is not used. The template is applied to the conversation with a mark in place of the last
  answer, and only the text behind the mark is tokenized: end of turn, new messages, and the start of the next turn. If
  the policy has already written the end of turn, its first token is not repeated.
- An answer may come back without its reasoning, with other ids of its tool calls, other spacing of their arguments, or
  other white space around its text: the tokens are those that were sampled.
- A call whose messages otherwise do not begin with the conversation so far, or whose tools or template variables
  differ, does not continue it: the tokens so far would not match. ``difference`` names the first such difference.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.rollout.episodes.chat.calls import AssistantMessage, Chat, Prompt
from staleflow.clients.rollout.episodes.chat.refusal import ChatRefused
from staleflow.clients.rollout.episodes.chat.template import ChatTemplate, Message

ANSWER_MARK = f"answer{secrets.token_hex(16)}"
"""Placeholder for the last answer in a rendered conversation; it is random, so that no message can contain it."""


class Conversation:
    """A conversation up to one of its answers, kept next to its tokens. Immutable; ``extended`` returns another."""

    def __init__(self, template: ChatTemplate, prompt: Prompt | None = None, answer: AssistantMessage | None = None):
        """``prompt`` and ``answer``: the last call and its answer; None for an empty conversation."""
        self._template = template
        self._prompt = prompt
        self._messages: list[Message] = []
        self._text = ""
        """Prompt and answers so far of plain completions."""
        if isinstance(prompt, Chat) and answer is not None:
            self._messages = [*map(plain, prompt.messages), plain(answer.as_message())]
        elif isinstance(prompt, str) and answer is not None:
            self._text = prompt + answer.content

    def extended(self, prompt: Prompt, answer: AssistantMessage) -> "Conversation":
        """Return the conversation after this call and its answer."""
        return Conversation(self._template, prompt, answer)

    def difference(self, prompt: Prompt, so_far: NDArray[np.int32]) -> ChatRefused | None:
        """Return why the call does not continue this conversation, whose tokens are ``so_far``; None if it does."""
        earlier = self._prompt
        if earlier is None:
            return None
        if isinstance(prompt, Chat) != isinstance(earlier, Chat):
            return ChatRefused("a conversation has either chat calls or completion calls, not both", "mixed_calls")
        if isinstance(prompt, np.ndarray):
            same = np.array_equal(prompt[: len(so_far)], so_far)
            return None if same else _other("the prompt's tokens do not begin with those of the episode so far")
        if isinstance(prompt, str):
            same = bool(self._text) and prompt.startswith(self._text)
            return None if same else _other("the prompt does not begin with the text of the episode so far")
        assert isinstance(earlier, Chat)
        for name, now, before in (
            ("tools", prompt.tools, earlier.tools),
            ("chat_template_kwargs", prompt.options, earlier.options),
        ):
            if now != before:
                return _other(f"{name} differ from those of the conversation so far")
        for number, message in enumerate(self._messages):
            if number >= len(prompt.messages) or not same_message(plain(prompt.messages[number]), message):
                expected = f"{message['role']}: {str(message.get('content'))[:80]!r}"
                return _other(f"messages[{number}] differs from the conversation so far ({expected})")
        return None

    def given(self, prompt: Prompt, so_far: NDArray[np.int32], *, ended_itself: bool) -> NDArray[np.int32]:
        """Return the tokens that the call appends to ``so_far``. ``ended_itself``: the last of those is a stop token.

        ``ChatRefused`` if the call does not continue this conversation, or adds nothing to it.
        """
        if isinstance(prompt, Chat) and prompt.messages[-1]["role"] == "assistant":
            raise ChatRefused("the last message has role assistant; the policy writes the next answer", "no_turn")
        if (other := self.difference(prompt, so_far)) is not None:
            raise other
        if isinstance(prompt, np.ndarray):
            given = prompt[len(so_far) :]
        elif isinstance(prompt, str):
            first = self._prompt is None
            given = self._template.prompt_ids(prompt) if first else self._template.token_ids(prompt[len(self._text) :])
        elif self._messages:
            given = self._behind_answer(prompt)
            if ended_itself and len(given) and given[0] == so_far[-1]:
                given = given[1:]
        else:
            given = self._template.token_ids(self._first(prompt))
        if len(given) == 0:
            raise ChatRefused("the call adds nothing to the conversation so far", "nothing_new")
        return given

    def _first(self, prompt: Chat) -> str:
        """Render the first call."""
        rendered = self._render(prompt, prompt.messages)
        if prompt.tools and rendered == self._render(Chat(messages=[], options=prompt.options), prompt.messages):
            raise ChatRefused("the model's chat template ignores tools", "template", param="tools")
        return rendered

    def _behind_answer(self, prompt: Chat) -> NDArray[np.int32]:
        """Return the tokens behind the last answer."""
        marked: Message = {"role": "assistant", "content": ANSWER_MARK}
        new = prompt.messages[len(self._messages) :]
        rendered = self._render(prompt, [*self._messages[:-1], marked, *new])
        _, mark, behind = rendered.rpartition(ANSWER_MARK)
        if not mark:
            raise ChatRefused("the chat template omits the last answer, so nothing can follow it", "template")
        return self._template.token_ids(behind)

    def _render(self, prompt: Chat, messages: Sequence[Message]) -> str:
        try:
            return self._template.render([_for_template(plain(one)) for one in messages], prompt.tools, prompt.options)
        except ValueError as error:
            raise ChatRefused(str(error), "template") from error


def _other(what: str) -> ChatRefused:
    detail = (
        f"{what}; an episode is one conversation that each call extends, unless environment.branches permits others"
    )
    return ChatRefused(detail, "other_history")


def plain(message: Mapping[str, Any]) -> Message:
    """Return a message without empty fields (null, empty list), with its text parts joined.

    The role ``developer``, which chat templates do not know, becomes ``system``.
    """
    kept = {name: value for name, value in message.items() if value is not None and value != []}
    content = kept.get("content")
    if isinstance(content, list):
        parts = [
            cast(dict[str, object], part) if isinstance(part, dict) else {} for part in cast(list[object], content)
        ]
        if any(part.get("type") != "text" for part in parts):
            raise ChatRefused("a message has parts that are not text", "unsupported_content")
        kept["content"] = "".join(str(part.get("text", "")) for part in parts)
    if kept.get("role") == "developer":
        kept["role"] = "system"
    return kept


def same_message(sent: Message, recorded: Message) -> bool:
    """Return whether a client sent ``recorded`` back. An answer may have lost what its tokens keep."""
    if recorded["role"] != "assistant" or sent.get("role") != "assistant":
        return dict(sent) == dict(recorded)
    reasoning = sent.get("reasoning_content")
    return (
        str(sent.get("content", "")).strip() == str(recorded.get("content", "")).strip()
        and _calls(sent) == _calls(recorded)
        and (not reasoning or reasoning == recorded.get("reasoning_content"))
    )


def _calls(message: Message) -> list[tuple[object, object]]:
    """Return name and decoded arguments of the tool calls of a message."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [(function["name"], _decoded(function.get("arguments"))) for function in functions]


def _decoded(arguments: object) -> object:
    if not isinstance(arguments, str):
        return arguments
    try:
        return cast(object, json.loads(arguments))
    except ValueError:
        return arguments


def _for_template(message: Message) -> Message:
    """Return a message with decoded arguments of its tool calls, as chat templates expect."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    decoded = [
        {**call, "function": {**call["function"], "arguments": _decoded(call["function"].get("arguments") or "{}")}}
        for call in calls
    ]
    return {**message, "tool_calls": decoded}
