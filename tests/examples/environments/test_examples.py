# pyright: basic, reportMissingImports=false
"""The shipped environments work, and so does the model that one of them is shipped with."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from staleflow.clients.rollout.episodes.env_client import Client, EpisodeOver
from staleflow.examples.environments.calculator import Calculator, calculate
from staleflow.examples.environments.question import Question

ROW = {"prompt": "4+8=", "answer": "12"}


class Scripted(Client):
    """A client whose policy returns the scripted answers; ``None`` ends the episode."""

    def __init__(self, *answers: str | None) -> None:
        super().__init__("http://nowhere", "")
        self.answers = list(answers)
        self.heard: list[Any] = []

    async def post(self, route: str, arguments: dict[str, Any]) -> Any:
        self.heard = [m if isinstance(m, Mapping) else vars(m) for m in arguments["messages"]]
        if (answer := self.answers.pop(0)) is None:
            raise EpisodeOver(400, "episode_over", "interrupted")
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(role="assistant", content=answer))])


@pytest.mark.parametrize(
    ("answers", "value", "returned"),
    [
        (("4+8", "12"), "12", {"reward": 1.0, "calculated": 1.0}),
        (("4+8", "12?"), "12", {"reward": 0.0, "calculated": 1.0}),
        (("4*8", "12"), "?", {"reward": 1.0, "calculated": 0.0}),
        (("4-8", None), "-4", {"reward": 0.0, "calculated": 1.0}),
    ],
)
async def test_the_calculator_answers_between_two_turns(
    answers: tuple[str | None, ...], value: str, returned: dict[str, float]
) -> None:
    client = Scripted(*answers)
    assert await Calculator().rollout(client, ROW) == returned
    assert [(message["role"], message["content"]) for message in client.heard] == [
        ("user", "4+8="),
        ("assistant", answers[0]),
        ("tool", value),
    ]


@pytest.mark.parametrize("text", ["", "4", "4+", "+4", "4+8=", "4**8", "__import__('os')", "9" * 10 + "+1"])
def test_the_calculator_calculates_nothing_else(text: str) -> None:
    assert calculate(text) == "?"


async def test_a_question_is_asked_as_it_is_written() -> None:
    client = Scripted(" 12\n")
    assert await Question("Answer in digits.").rollout(client, ROW) == 1.0
    assert [message["role"] for message in client.heard] == ["system", "user"]
    assert await Question().rollout(Scripted("13"), ROW) == 0.0


def test_the_model_has_read_dialogues_as_the_rollout_worker_writes_them() -> None:
    pytest.importorskip("transformers")
    import numpy as np

    from staleflow.clients.rollout.episodes.chat.calls import AssistantMessage, Chat
    from staleflow.clients.rollout.episodes.chat.conversation import Conversation
    from staleflow.clients.rollout.episodes.chat.tokenizer import TokenizerChatTemplate
    from staleflow.examples.environments.model import chat_tokenizer, dialogues

    tokenizer = chat_tokenizer()
    (asked, _), (expression, _), (told, _), _ = next(dialogues([ROW], 0, 0.0))
    conversation = Conversation(TokenizerChatTemplate(tokenizer))
    messages: list[Any] = [{"role": "user", "content": ROW["prompt"]}]
    first = conversation.given(Chat(messages=messages), np.empty(0, np.int32), ended_itself=False)
    assert first.tolist() == tokenizer.encode(asked)
    conversation = conversation.extended(Chat(messages=messages), AssistantMessage(content="4+8"))
    messages = [*messages, {"role": "assistant", "content": "4+8"}, {"role": "tool", "content": "12"}]
    so_far = np.array(tokenizer.encode(asked + expression), np.int32)
    assert conversation.given(Chat(messages=messages), so_far, ended_itself=True).tolist() == tokenizer.encode(told)
