"""Token-exact continuation: compute the tokens that a call adds to an episode. Pure, no engine.

An episode is one conversation. Each call repeats it and extends it, as chat clients do. The next turn's prompt consists
of the exact tokens so far, as they were sampled, and the tokens of the new messages. Sampled text is never tokenized
again.

- Chat templates render history in their own way (some omit earlier reasoning, or trim). This does not matter here,
  since the rendered history is not used. The template is applied to the conversation with a mark in place of the last
  answer, and only the text behind the mark is tokenized: end of turn, new messages, and the start of the next turn. If
  the policy has already written the end of turn, its first token is not repeated.
- A call whose messages do not begin with the conversation so far, answer included, is rejected with the message that
  differs: an edited history, a second conversation or a branch does not match the sampled tokens.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.rollout.episodes.chat.calls import ChatRefused, Prompt
from staleflow.clients.rollout.episodes.chat.template import ChatTemplate, Message

ANSWER_MARK = f"answer{secrets.token_hex(16)}"
"""Placeholder for the last answer in a rendered conversation; it is random, so that no message can contain it."""


class Conversation:
    """Messages of one episode, kept next to its tokens."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._messages: list[Message] = []
        self._text = ""
        """Prompt and answers so far of an episode of plain completions."""
        self._kind: type | None = None

    def given(self, prompt: Prompt, so_far: NDArray[np.int32], *, ended_itself: bool) -> NDArray[np.int32]:
        """Return the tokens that the call appends to ``so_far``. ``ended_itself``: the last of those is a stop token.

        ``ChatRefused`` leaves the conversation as it was.
        """
        kind = list if isinstance(prompt, np.ndarray | str) else dict
        if self._kind not in (None, kind):
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

    def record(self, prompt: Prompt, answer: str) -> None:
        """Record the answer to a call."""
        if isinstance(prompt, np.ndarray | str):
            self._kind = list
            self._text = prompt + answer if isinstance(prompt, str) else ""
        else:
            self._kind = dict
            self._messages = [*(plain(message) for message in prompt), {"role": "assistant", "content": answer}]

    def _after_tokens(self, prompt: NDArray[np.int32], so_far: NDArray[np.int32]) -> NDArray[np.int32]:
        if not np.array_equal(prompt[: len(so_far)], so_far):
            raise ChatRefused("the prompt's tokens do not begin with those of the episode so far", "other_history")
        return prompt[len(so_far) :]

    def _after_text(self, prompt: str) -> NDArray[np.int32]:
        if self._kind is None:
            return self._template.prompt_ids(prompt)
        if not self._text or not prompt.startswith(self._text):
            raise ChatRefused("the prompt does not begin with the text of the episode so far", "other_history")
        return self._template.token_ids(prompt[len(self._text) :])

    def _after_messages(
        self, messages: list[Message], so_far: NDArray[np.int32], ended_itself: bool
    ) -> NDArray[np.int32]:
        history = self._messages
        if messages[-1]["role"] == "assistant":
            raise ChatRefused("the last message has role assistant; the policy writes the next answer", "no_turn")
        if not history:
            return self._template.token_ids(self._render(messages))
        for number, message in enumerate(history):
            if number >= len(messages) or dict(messages[number]) != dict(message):
                expected = f"{message['role']}: {str(message.get('content'))[:80]!r}"
                what = f"messages[{number}] differs from the conversation so far ({expected})"
                raise ChatRefused(f"{what}; an episode is one conversation that each call extends", "other_history")
        marked = {"role": "assistant", "content": ANSWER_MARK}
        rendered = self._render([*history[:-1], marked, *messages[len(history) :]])
        _, mark, behind = rendered.rpartition(ANSWER_MARK)
        if not mark:
            raise ChatRefused("the chat template omits the last answer, so nothing can follow it", "template")
        given = self._template.token_ids(behind)
        if ended_itself and len(given) and given[0] == so_far[-1]:
            given = given[1:]
        return given

    def _render(self, messages: Sequence[Message]) -> str:
        try:
            return self._template.render(messages)
        except ValueError as error:
            raise ChatRefused(str(error), "template") from error


def plain(message: Mapping[str, Any]) -> Message:
    """Return a message without empty fields (null, empty list), with its text parts joined."""
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
