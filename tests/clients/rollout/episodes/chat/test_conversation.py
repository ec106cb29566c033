"""A conversation adds the right tokens per call, although each template renders history in its own way."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from staleflow.clients.rollout.episodes.chat.calls import AssistantMessage, Chat
from staleflow.clients.rollout.episodes.chat.conversation import Conversation
from staleflow.clients.rollout.episodes.chat.refusal import ChatRefused
from staleflow.clients.rollout.episodes.chat.template import NO_OPTIONS, ByteChatTemplate, Message, Tool


class Forgetful(ByteChatTemplate):
    """A template that ends a turn with ``.``, also the stop token, and drops reasoning from history as some models
    do."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: Mapping[str, Any] = NO_OPTIONS
    ) -> str:
        said = [(str(message["role"])[0], str(message["content"]).rpartition("</think>")[2]) for message in messages]
        return "".join(f"[{role}]{content.strip()}.\n" for role, content in said) + "[a]"


def chat(*messages: Message) -> Chat:
    return Chat(messages=list(messages))


def ids(text: str) -> NDArray[np.int32]:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def text(token_ids: NDArray[np.int32]) -> str:
    return bytes(token_ids.tolist()).decode()


USER: Message = {"role": "user", "content": "hi"}
ANSWER = "<think>long thoughts</think> 4 "


def after_one_turn(sampled: str) -> tuple[Conversation, NDArray[np.int32], list[Message]]:
    """Return a conversation with one answer, its tokens so far, and its messages."""
    conversation = Conversation(Forgetful())
    given = conversation.given(chat(USER), ids(""), ended_itself=False)
    assert text(given) == "[u]hi.\n[a]"
    conversation = conversation.extended(chat(USER), AssistantMessage(content=ANSWER))
    return conversation, np.concatenate([given, ids(sampled)]), [USER, {"role": "assistant", "content": ANSWER}]


def test_what_the_template_forgets_stays_in_the_tokens_and_only_what_is_new_is_added() -> None:
    conversation, so_far, messages = after_one_turn(ANSWER + ".")
    tool = {"role": "tool", "content": "5"}
    assert text(conversation.given(chat(*messages, tool), so_far, ended_itself=True)) == "\n[t]5.\n[a]"


def test_an_answer_that_was_cut_is_ended_by_the_environment_even_where_it_looks_ended() -> None:
    for sampled in (ANSWER, ANSWER + "."):
        conversation, so_far, messages = after_one_turn(sampled)
        given = conversation.given(chat(*messages, USER, USER), so_far, ended_itself=False)
        assert text(given) == ".\n[u]hi.\n[u]hi.\n[a]"


def test_an_answer_may_come_back_as_clients_send_it() -> None:
    conversation, so_far, messages = after_one_turn(ANSWER + ".")
    sent: dict[str, Any] = {
        **messages[1],
        "refusal": None,
        "tool_calls": [],
        "content": [{"type": "text", "text": ANSWER}],
    }
    assert len(conversation.given(chat(USER, sent, USER), so_far, ended_itself=True)) > 0


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        (chat(USER), "other_history"),
        (chat(USER, {"role": "assistant", "content": "4"}, USER), "other_history"),
        (chat({"role": "user", "content": "ho"}, {"role": "assistant", "content": ANSWER}, USER), "other_history"),
        (chat(USER, {"role": "assistant", "content": ANSWER}), "no_turn"),
        (chat(USER, {"role": "user", "content": [{"type": "image_url"}]}), "unsupported_content"),
        ("hi", "mixed_calls"),
        (ids("hi"), "mixed_calls"),
    ],
)
def test_another_history_is_refused_and_the_conversation_goes_on(prompt: Any, code: str) -> None:
    conversation, so_far, messages = after_one_turn(ANSWER + ".")
    with pytest.raises(ChatRefused) as refused:
        conversation.given(prompt, so_far, ended_itself=True)
    assert (refused.value.code, refused.value.status) == (code, 400)
    assert len(conversation.given(chat(*messages, USER), so_far, ended_itself=True)) > 0


def test_a_template_that_drops_the_answer_is_refused() -> None:
    class Mute(ByteChatTemplate):
        def render(
            self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: Mapping[str, Any] = NO_OPTIONS
        ) -> str:
            return "assistant: "

    conversation = Conversation(Mute()).extended(chat(USER), AssistantMessage(content="4"))
    with pytest.raises(ChatRefused, match="omits the last answer"):
        conversation.given(chat(USER, {"role": "assistant", "content": "4"}, USER), ids("x"), ended_itself=True)


def test_plain_text_goes_on_where_it_ended_and_nowhere_else() -> None:
    conversation = Conversation(ByteChatTemplate())
    assert text(conversation.given("2+2=", ids(""), ended_itself=False)) == "2+2="
    conversation = conversation.extended("2+2=", AssistantMessage(content="4"))
    assert text(conversation.given("2+2=4\n3+3=", ids("2+2=4\0"), ended_itself=True)) == "\n3+3="
    for other, code in (("2+2=5", "other_history"), ("3", "other_history"), ("2+2=4", "nothing_new")):
        with pytest.raises(ChatRefused) as refused:
            conversation.given(other, ids("2+2=4\0"), ended_itself=True)
        assert refused.value.code == code


def test_tokens_go_on_with_the_exact_tokens_so_far() -> None:
    conversation = Conversation(ByteChatTemplate()).extended(ids("ab"), AssistantMessage(content="c"))
    assert text(conversation.given(ids("abc\0d"), ids("abc\0"), ended_itself=True)) == "d"
    for other in ("abd", "ab", "abc\0"):
        with pytest.raises(ChatRefused):
            conversation.given(ids(other), ids("abc\0"), ended_itself=True)
