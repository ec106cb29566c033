"""Token-exact continuation: which tokens a call adds to an episode. Pure, no engine.

An episode is one conversation. Each call repeats it and adds to it, as chat clients do; the tokens of the next turn's
prompt are the exact tokens so far, as they were sampled, and those of the new messages. Nothing sampled is ever
tokenised again.

- A chat template renders history its own way (some leave out earlier reasoning, or trim). That does not matter here:
  the history is not rendered for its own sake. The template is applied to the conversation with a mark in place of the
  last answer, and what it puts behind the mark is tokenised by itself: end of turn, new messages, the next turn's
  beginning. If the policy has already written the end of turn, its first token is not repeated.
- A call whose messages do not begin with the conversation so far, answer included, is refused and names the message
  that differs: an edited history, a second conversation or a branch is not what was sampled.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.rollout.episodes.chat.calls import ChatRefused, Prompt
from staleflow.clients.rollout.episodes.chat.template import Message, Speech

MARK = f"answer{secrets.token_hex(16)}"
"""Stands for the last answer in a rendered conversation; nobody can know it and write it."""


class Conversation:
    """What was said in one episode, next to its tokens."""

    def __init__(self, speech: Speech) -> None:
        self._speech = speech
        self._messages: list[Message] = []
        self._text = ""
        """Of plain completions: prompt and answers so far."""
        self._begun: type | None = None

    def given(self, prompt: Prompt, so_far: NDArray[np.int32], *, ended_itself: bool) -> NDArray[np.int32]:
        """The tokens that the call puts behind ``so_far``. ``ended_itself``: the last of those is a stop token.

        ``ChatRefused`` leaves the conversation as it was.
        """
        kind = list if isinstance(prompt, np.ndarray | str) else dict
        if self._begun not in (None, kind):
            raise ChatRefused("an episode speaks by chat calls or by completion calls, not by both", "mixed_calls")
        if isinstance(prompt, np.ndarray):
            given = self._after_tokens(prompt, so_far)
        elif isinstance(prompt, str):
            given = self._after_text(prompt)
        else:
            given = self._after_messages([plain(message) for message in prompt], so_far, ended_itself)
        if len(given) == 0:
            raise ChatRefused("the call adds nothing to the conversation so far", "nothing_new")
        return given

    def said(self, prompt: Prompt, answer: str) -> None:
        """The call was answered."""
        if isinstance(prompt, np.ndarray | str):
            self._begun = list
            self._text = prompt + answer if isinstance(prompt, str) else ""
        else:
            self._begun = dict
            self._messages = [*(plain(message) for message in prompt), {"role": "assistant", "content": answer}]

    def _after_tokens(self, prompt: NDArray[np.int32], so_far: NDArray[np.int32]) -> NDArray[np.int32]:
        if not np.array_equal(prompt[: len(so_far)], so_far):
            raise ChatRefused("the prompt's tokens do not begin with those of the episode so far", "other_history")
        return prompt[len(so_far) :]

    def _after_text(self, prompt: str) -> NDArray[np.int32]:
        if self._begun is None:
            return self._speech.prompt_ids(prompt)
        if not self._text or not prompt.startswith(self._text):
            raise ChatRefused("the prompt does not begin with the text of the episode so far", "other_history")
        return self._speech.token_ids(prompt[len(self._text) :])

    def _after_messages(
        self, messages: list[Message], so_far: NDArray[np.int32], ended_itself: bool
    ) -> NDArray[np.int32]:
        known = self._messages
        if messages[-1]["role"] == "assistant":
            raise ChatRefused("the last message is the assistant's; it is to write the next one", "no_turn")
        if not known:
            return self._speech.token_ids(self._render(messages))
        for number, message in enumerate(known):
            if number >= len(messages) or dict(messages[number]) != dict(message):
                said = f"{message['role']}: {str(message.get('content'))[:80]!r}"
                what = f"messages[{number}] is not what was said ({said})"
                raise ChatRefused(f"{what}: an episode is one conversation, each call goes on with it", "other_history")
        marked = {"role": "assistant", "content": MARK}
        rendered = self._render([*known[:-1], marked, *messages[len(known) :]])
        _, found, behind = rendered.rpartition(MARK)
        if not found:
            raise ChatRefused("the chat template leaves out the last answer, so nothing can follow it", "template")
        given = self._speech.token_ids(behind)
        if ended_itself and len(given) and given[0] == so_far[-1]:
            given = given[1:]
        return given

    def _render(self, messages: Sequence[Message]) -> str:
        try:
            return self._speech.render(messages)
        except ValueError as error:
            raise ChatRefused(str(error), "template") from error


def plain(message: Mapping[str, Any]) -> Message:
    """A message without what says nothing (null, empty list), its text parts as one text."""
    kept = {name: value for name, value in message.items() if value is not None and value != []}
    content = kept.get("content")
    if isinstance(content, list):
        parts = [
            cast(dict[str, object], part) if isinstance(part, dict) else {} for part in cast(list[object], content)
        ]
        if any(part.get("type") != "text" for part in parts):
            raise ChatRefused("a message has parts that are not text", "unsupported_content")
        kept["content"] = "".join(str(part.get("text", "")) for part in parts)
    return kept
