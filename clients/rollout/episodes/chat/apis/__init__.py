"""The APIs of the server, one module each: validate a call, convert the answer to a reply or a stream."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from staleflow.clients.rollout.episodes.chat.apis import chat_completions, completions, messages
from staleflow.clients.rollout.episodes.chat.calls import Answer, Call, Limits
from staleflow.clients.rollout.episodes.chat.routes import CHAT, COMPLETIONS, MESSAGES

__all__ = ["APIS", "Api"]


@dataclass(frozen=True, slots=True)
class Api:
    """The conversions of one route."""

    parse: Callable[[object, Limits], Call]
    reply: Callable[[Call, Answer], dict[str, Any]]
    events: Callable[[Call, Answer], Iterator[bytes]]


APIS = {
    CHAT: Api(chat_completions.parse, chat_completions.reply, chat_completions.events),
    COMPLETIONS: Api(completions.parse, completions.reply, completions.events),
    MESSAGES: Api(messages.parse, messages.reply, messages.events),
}
