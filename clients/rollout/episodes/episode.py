"""The worker's side of one call of ``rollout``: serve the episode's calls and keep the tokens of its conversations.

Each call is one request to the engine (``n`` requests for ``n`` choices) after the exact tokens of the conversation
that it continues (``chat/conversation.py``), and one turn of that conversation's transcript. One of the conversations
is trained. ``environment.branches`` decides about the others:

- ``refuse``: there are none. A call must continue the conversation; calls are sequential.
- ``first``: the trained conversation is the one that the first call began. A call that continues another one, or an
  earlier point, is answered from its exact tokens, and these are not trained.
- ``last``: the trained conversation is the one that was answered last.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.rollout.engines.base import AsyncEngine, Request, RequestError, Sampling, Trajectory
from staleflow.clients.rollout.episodes.chat import reasoning
from staleflow.clients.rollout.episodes.chat.apis import APIS
from staleflow.clients.rollout.episodes.chat.apis.events import EventStream
from staleflow.clients.rollout.episodes.chat.apis.models import model_list
from staleflow.clients.rollout.episodes.chat.calls import (
    Answer,
    AssistantMessage,
    Call,
    Chat,
    Choice,
    Ended,
    Limits,
    Prompt,
    ToolCall,
)
from staleflow.clients.rollout.episodes.chat.conversation import Conversation
from staleflow.clients.rollout.episodes.chat.refusal import ChatRefused
from staleflow.clients.rollout.episodes.chat.routes import MODELS
from staleflow.clients.rollout.episodes.chat.stops import cut_at_stop
from staleflow.clients.rollout.episodes.chat.template import ChatTemplate
from staleflow.clients.rollout.episodes.chat.tool_parsers import PARSERS, tool_parser
from staleflow.clients.rollout.episodes.chat.transcript import Transcript, Turn
from staleflow.clients.rollout.groups import request_id
from staleflow.configs.schema import Environment
from staleflow.protocols.wire.trajectory import Finish

OPENING_TOKENS = 16
"""Tokens at the end of a prompt that are searched for an opening tag of reasoning."""


@dataclass(frozen=True, slots=True)
class _Branch:
    """One conversation up to one of its answers."""

    conversation: Conversation
    turns: tuple[Turn, ...] = ()

    @property
    def token_ids(self) -> NDArray[np.int32]:
        return Transcript(list(self.turns)).token_ids

    @property
    def ended_itself(self) -> bool:
        """True if the last token is a stop token."""
        return bool(self.turns) and self.turns[-1].finish is Finish.STOP and not self.turns[-1].by_text

    def begins(self, prompt: Prompt) -> bool:
        """Return whether a call with this prompt continues the conversation; anything continues an empty one."""
        so_far = self.token_ids if isinstance(prompt, np.ndarray) else np.empty(0, np.int32)
        return self.conversation.difference(prompt, so_far) is None


class Episode:
    """One episode. ``settings.run`` is not used here."""

    def __init__(
        self, engine: AsyncEngine, template: ChatTemplate, sampling: Sampling, *, seed: int, settings: Environment
    ) -> None:
        self.over = asyncio.Event()
        """Set once the episode was interrupted and has its tokens."""
        self._engine = engine
        self._template = template
        self._settings = settings
        self._limits = Limits(
            sampling=sampling,
            override=settings.sampling_arguments == "override",
            branches=settings.branches != "refuse",
        )
        self._parser = tool_parser(settings.tool_parser, template.source)
        self._reasoning = reasoning.has_reasoning(settings.reasoning_parser, template.source)
        self._seed = seed
        self._trained = _Branch(Conversation(template))
        self._branches = [self._trained]
        """The empty conversation, and with ``environment.branches`` one for every answer."""
        self._calls = self._in_progress = self._answered = self._tool_calls = 0
        self._interrupted = False
        self._generating: dict[int, asyncio.Future[Trajectory]] = {}

    @property
    def transcript(self) -> Transcript:
        """Return the turns of the trained conversation so far."""
        return Transcript(list(self._trained.turns), interrupted=self._interrupted)

    async def answer(self, route: str, body: object) -> dict[str, Any] | EventStream:
        """Serve one call. ``ChatRefused`` leaves the episode unchanged."""
        if route == MODELS:
            return model_list()
        api = APIS[route]
        call = api.parse(body, self._limits)
        self._check(call)
        base = self._base(call)
        so_far = base.token_ids
        given = base.conversation.given(call.prompt, so_far, ended_itself=base.ended_itself)
        self._in_progress += 1  # before the first await: two calls may arrive in one turn of the event loop
        try:
            trajectories = await self._generate(np.concatenate([so_far, given]), call)
        finally:
            self._in_progress -= 1
        choices = [self._record(base, given, call, trajectory, n) for n, trajectory in enumerate(trajectories)]
        self._answered += 1
        if self._interrupted and not self._generating:
            self.over.set()
        answer = Answer(
            number=self._answered,
            created=int(time.time()),
            prompt_tokens=len(so_far) + len(given),
            choices=choices,
        )
        return EventStream(b"".join(api.events(call, answer))) if call.stream else api.reply(call, answer)

    def interrupt(self) -> None:
        """End with the tokens so far, at least one."""
        self._interrupted = True
        for request in self._generating:
            self._engine.interrupt(request)
        if not self._generating and self._trained.turns:
            self.over.set()

    def close(self) -> None:
        """Abort the calls in progress."""
        for generating in self._generating.values():
            generating.cancel()

    def _check(self, call: Call) -> None:
        if call.parse_tools and self._parser is None:
            known = f"set environment.tool_parser to one of {', '.join(PARSERS)}"
            detail = f"the format of tool calls of this model's chat template is not known; {known}"
            raise ChatRefused(detail, "unsupported", param="tools")
        if self._in_progress and not self._limits.branches:
            raise ChatRefused("another call of this episode is in progress; calls must be sequential", "busy")
        if self._interrupted and self._trained.turns:
            raise ChatRefused("the episode was interrupted", "episode_over")
        if 0 < self._settings.max_turns <= self._answered:
            raise ChatRefused(f"environment.max_turns is {self._settings.max_turns}", "max_turns")

    def _base(self, call: Call) -> _Branch:
        """Return the conversation that the call continues: the longest one that it begins with."""
        if not self._limits.branches:
            return self._trained
        candidates = sorted(self._branches, key=lambda branch: (len(branch.turns), branch is self._trained))
        return next(branch for branch in reversed(candidates) if branch.begins(call.prompt))

    async def _generate(self, prompt_ids: NDArray[np.int32], call: Call) -> list[Trajectory]:
        """Return ``n`` trajectories. Their seeds depend on the number of the call and of the choice only."""
        number = self._calls
        self._calls += 1
        origins = [(self._seed, number, choice) if choice else (self._seed, number) for choice in range(call.n)]
        seeds = [int(np.random.SeedSequence(origin).generate_state(1, np.uint64)[0]) for origin in origins]
        try:
            return await asyncio.gather(*(self._sample(prompt_ids, call, seed) for seed in seeds))
        except RequestError as error:
            raise ChatRefused(str(error), "context_length_exceeded") from error

    async def _sample(self, prompt_ids: NDArray[np.int32], call: Call, seed: int) -> Trajectory:
        sampling = replace(self._limits.sampling, max_new_tokens=call.max_tokens, stop=self._stops(call))
        request = Request(id=request_id(), prompt_ids=prompt_ids, sampling=sampling, seed=seed)
        generating = self._generating[request.id] = asyncio.ensure_future(self._engine.generate(request))
        try:
            if self._interrupted:
                await asyncio.sleep(0)  # let the task submit its request: the engine ignores unknown ids
                self._engine.interrupt(request.id)
            return await generating
        finally:
            generating.cancel()
            del self._generating[request.id]

    def _record(
        self, base: _Branch, given: NDArray[np.int32], call: Call, trajectory: Trajectory, number: int
    ) -> Choice:
        """Add the conversation with this answer, and return the answer."""
        keep = self._kept(call)
        turn, text, stop = cut_at_stop(given, trajectory, self._stops(call), partial(self._template.text, keep=keep))
        message = self._message(call, given, text)
        branch = _Branch(base.conversation.extended(call.prompt, message), (*base.turns, turn))
        if self._limits.branches:
            self._branches.append(branch)
        if number == 0 and (self._settings.branches == "last" or base is self._trained):
            self._trained = branch
        token_ids = turn.token_ids
        return Choice(
            message=message,
            text=text,
            ended=_ended(turn, message),
            stop=stop,
            token_ids=token_ids.tolist(),
            tokens=self._token_texts(token_ids, keep) if call.logprobs else [],
            logprobs=turn.logprobs.tolist() if call.logprobs else [],
        )

    def _stops(self, call: Call) -> tuple[str, ...]:
        """Return the stop strings of a call; those of the run if it names none."""
        return call.stop or self._limits.sampling.stop

    def _kept(self, call: Call) -> tuple[str, ...]:
        """Return the special tokens that the parsers of this call read."""
        tags = (reasoning.OPEN, reasoning.CLOSE) if self._reasoning and isinstance(call.prompt, Chat) else ()
        return (*tags, *self._parser.markers) if call.parse_tools and self._parser else tags

    def _message(self, call: Call, given: NDArray[np.int32], text: str) -> AssistantMessage:
        """Split an answer's text into reasoning, content and tool calls."""
        thoughts = ""
        if self._reasoning and isinstance(call.prompt, Chat):
            opening = self._template.text(given[-OPENING_TOKENS:], keep=(reasoning.OPEN,)).rstrip()
            thoughts, text = reasoning.split_reasoning(text, opened=opening.endswith(reasoning.OPEN))
        if not call.parse_tools or self._parser is None:
            return AssistantMessage(content=text, reasoning=thoughts)
        parsed = self._parser.parse(text)
        calls: list[ToolCall] = []
        for written in parsed.calls:
            # Nine characters and digits: Mistral's templates demand that. Counted, so that a replay has the same ids.
            calls.append(ToolCall(id=f"call{self._tool_calls:05}", name=written.name, arguments=written.arguments))
            self._tool_calls += 1
        return AssistantMessage(content=parsed.content, reasoning=thoughts, tool_calls=tuple(calls))

    def _token_texts(self, token_ids: NDArray[np.int32], keep: Sequence[str]) -> list[str]:
        return [self._template.text(token_ids[n : n + 1], keep) for n in range(len(token_ids))]


def _ended(turn: Turn, message: AssistantMessage) -> Ended:
    if turn.finish is not Finish.STOP:
        return "length"
    if message.tool_calls:
        return "tools"
    return "string" if turn.by_text else "token"
