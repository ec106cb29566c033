"""Groups whose trajectories are episodes of user code: as ``groups.produce``, with an environment in between.

One sample is one episode, and a group's run side by side. An episode's calls come through the ``ChatServer``, one at a
time; each is one request to the engine, after the exact tokens so far (``chat_conversation``), and one turn of the
transcript. What the environment does wrong costs its group, and nothing else.

- interrupt: the turn under way ends with the tokens so far and is answered; the next call is refused
  (``episode_over``), and the environment has ``LAST_WORD_S`` to return. An episode that has written nothing yet writes
  one token at least. Numbers that an interrupted episode did not return are 0 where the others of its group have some.
- abort: the turn under way is aborted, the episode is cancelled in its process.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.rollout.engines.base import AsyncEngine, Request, RequestError, Sampling, Trajectory
from staleflow.clients.rollout.episodes.chat.calls import ChatAnswer, ChatCall, ChatRefused, parse, reply
from staleflow.clients.rollout.episodes.chat.conversation import Conversation
from staleflow.clients.rollout.episodes.chat.server import ChatServer
from staleflow.clients.rollout.episodes.chat.template import Speech
from staleflow.clients.rollout.episodes.chat.transcript import Transcript, Turn, cut, group_payload
from staleflow.clients.rollout.episodes.env_child import REWARD
from staleflow.clients.rollout.episodes.env_runner import EnvironmentRunner, EpisodeFailed
from staleflow.clients.rollout.groups import Held, Recipe, first_ended, request_id
from staleflow.clients.user_code.process import Killed
from staleflow.configs.schema import Config
from staleflow.protocols.wire.stages import ENVIRONMENT
from staleflow.protocols.wire.trajectory import Finish, GroupPayload

log = logging.getLogger(__name__)

LAST_WORD_S = 5.0
"""Between an interrupt and the end of an episode that does not return."""


class Episode:
    """The worker's side of one call of ``rollout``: answers its calls and keeps the transcript."""

    def __init__(self, engine: AsyncEngine, speech: Speech, sampling: Sampling, *, seed: int, max_turns: int) -> None:
        self.transcript = Transcript()
        self.over = asyncio.Event()
        """Set when it was interrupted and has its tokens."""
        self._engine = engine
        self._speech = speech
        self._sampling = sampling
        self._seed = seed
        self._max_turns = max_turns
        self._conversation = Conversation(speech)
        self._request: int | None = None
        self._generating: asyncio.Future[Trajectory] | None = None

    async def answer(self, route: str, body: object) -> dict[str, Any]:
        """One call. ``ChatRefused`` leaves everything as it was."""
        call, transcript = parse(route, body, self._sampling), self.transcript
        if self._request is not None:
            raise ChatRefused("another call of this episode is under way; they come one at a time", "busy")
        if transcript.interrupted and transcript.turns:
            raise ChatRefused("the episode was interrupted", "episode_over")
        if self._max_turns and len(transcript.turns) >= self._max_turns:
            raise ChatRefused(f"environment.max_turns is {self._max_turns}", "max_turns")
        so_far = transcript.token_ids
        ended_itself = bool(transcript.turns) and _ended_itself(transcript.turns[-1])
        given = self._conversation.given(call.prompt, so_far, ended_itself=ended_itself)
        trajectory = await self._generate(np.concatenate([so_far, given]), call)
        turn, text = self._cut(given, trajectory, call.stop)
        transcript.turns.append(turn)
        self._conversation.said(call.prompt, text)
        if transcript.interrupted:
            self.over.set()
        return self._reply(route, call, turn, text, len(so_far) + len(given))

    def interrupt(self) -> None:
        """End with the tokens so far, one at least."""
        self.transcript.interrupted = True
        if self._request is not None:
            self._engine.interrupt(self._request)
        elif self.transcript.turns:
            self.over.set()

    def close(self) -> None:
        """Abort the turn under way, if there is one."""
        if self._generating is not None:
            self._generating.cancel()

    async def _generate(self, prompt_ids: NDArray[np.int32], call: ChatCall) -> Trajectory:
        seed = np.random.SeedSequence((self._seed, len(self.transcript.turns))).generate_state(1, np.uint64)[0]
        sampling = Sampling(max_new_tokens=call.max_tokens, temperature=self._sampling.temperature)
        self._request = request_id()
        request = Request(id=self._request, prompt_ids=prompt_ids, sampling=sampling, seed=int(seed))
        generating = self._generating = asyncio.ensure_future(self._engine.generate(request))
        try:
            if self.transcript.interrupted:
                await asyncio.sleep(0)  # it has said its request by now
                self._engine.interrupt(request.id)
            return await generating
        except RequestError as error:
            raise ChatRefused(str(error), "context_length_exceeded") from error
        finally:
            generating.cancel()
            self._request = None

    def _cut(self, given: NDArray[np.int32], trajectory: Trajectory, stops: Sequence[str]) -> tuple[Turn, str]:
        """The turn and its text, ended by the first stop string.

        Where a text ends is a function of the tokens up to there, so what was sampled behind it may be left out: those
        before keep their probabilities. The engine knows token ids only, so it does write them first.
        """
        token_ids, text = trajectory.token_ids, self._speech.text(trajectory.token_ids)
        if not any(stop in text for stop in stops):
            return Turn(given=given, segments=trajectory.segments, finish=trajectory.finish), text
        low, high = 1, len(token_ids)
        while low < high:
            middle = (low + high) // 2
            written = self._speech.text(token_ids[:middle])
            low, high = (low, middle) if any(stop in written for stop in stops) else (middle + 1, high)
        text = self._speech.text(token_ids[:low])
        text = text[: min(text.index(stop) for stop in stops if stop in text)]
        return Turn(given=given, segments=cut(trajectory.segments, low), finish=Finish.STOP, by_text=True), text

    def _reply(self, route: str, call: ChatCall, turn: Turn, text: str, prompt_tokens: int) -> dict[str, Any]:
        token_ids = turn.token_ids
        answer = ChatAnswer(
            text=text,
            token_ids=token_ids.tolist(),
            tokens=[self._speech.text(token_ids[n : n + 1]) for n in range(len(token_ids))] if call.logprobs else [],
            logprobs=turn.logprobs.tolist() if call.logprobs else [],
            stopped=turn.finish is Finish.STOP,
            prompt_tokens=prompt_tokens,
        )
        return reply(route, call, answer, number=len(self.transcript.turns), created=int(time.time()))


def _ended_itself(turn: Turn) -> bool:
    """Whether its last token is a stop token."""
    return turn.finish is Finish.STOP and not turn.by_text


class Environments:
    """All that it takes to let an environment write groups with an engine. Made inside a running event loop."""

    def __init__(self, config: Config, engine: AsyncEngine, speech: Speech, recipe: Recipe) -> None:
        self._engine = engine
        self._speech = speech
        self._recipe = recipe
        self._max_turns = config.environment.max_turns
        self._rewarded = bool(config.reward.run)
        self._runner = EnvironmentRunner(config.environment)
        self._server = ChatServer()

    async def start(self) -> None:
        """``ConfigError`` when the user's class cannot be imported or made."""
        await self._runner.start()
        await self._server.start()

    async def close(self) -> None:
        await self._runner.close()
        await self._server.close()

    @property
    def under_way(self) -> int:
        """Episodes that play."""
        return self._runner.under_way

    @property
    def waiting(self) -> int:
        """Episodes that wait for a process."""
        return self._runner.waiting

    async def produce(self, held: Held, row: Mapping[str, Any]) -> GroupPayload:
        """The group's episodes, the first ``group_size`` to end. ``EpisodeFailed`` if one of them has no result."""
        recipe, playing = self._recipe, dict[int, Episode]()

        def interrupt() -> None:
            for episode in playing.values():
                episode.interrupt()

        held.on_interrupt = interrupt

        async def play(sample: int) -> tuple[int, dict[str, float]]:
            def opened(episode: Episode) -> None:
                playing[sample] = episode
                if held.interrupted:
                    episode.interrupt()

            return sample, await self._play(row, recipe.sample_seed(held.assign, sample), opened)

        tasks = [asyncio.ensure_future(play(sample)) for sample in range(recipe.started)]
        done = sorted(await first_ended(tasks, recipe.group_size), key=lambda ended: ended[0])
        transcripts = [playing[sample].transcript for sample, _ in done]
        return group_payload(transcripts, self._columns(transcripts, [columns for _, columns in done]))

    async def episode(self, row: Mapping[str, Any], seed: int) -> GroupPayload:
        """One episode without a lease, as a group of one sample. ``EpisodeFailed`` if it has no result."""
        opened: list[Episode] = []
        columns = await self._play(row, seed, opened.append)
        transcripts = [opened[-1].transcript]
        return group_payload(transcripts, self._columns(transcripts, [columns]))

    async def _play(self, row: Mapping[str, Any], seed: int, opened: Callable[[Episode], None]) -> dict[str, float]:
        """What ``rollout`` returned for one episode; ``opened`` gets it, and again when another one ended its process.

        Then it is played from its start, with the same seed. The engine has counted the tokens of the lost play, and no
        group has them, so they show as generated and not trained.
        """
        suspicion = 0
        while True:
            episode = Episode(self._engine, self._speech, self._recipe.sampling, seed=seed, max_turns=self._max_turns)
            opened(episode)
            try:
                return await self._played(episode, row, suspicion)
            except Killed as killed:
                if episode.over.is_set():  # it has its tokens; its environment would have had the last word
                    return {}
                suspicion += killed.suspicion

    async def _played(self, episode: Episode, row: Mapping[str, Any], suspicion: int) -> dict[str, float]:
        key = self._server.open(episode.answer)
        rollout = asyncio.ensure_future(self._runner.play(self._server.base_url, key, row, suspicion))
        over = asyncio.ensure_future(episode.over.wait())
        try:
            await asyncio.wait((rollout, over), return_when=asyncio.FIRST_COMPLETED)
            if not rollout.done():
                await asyncio.wait((rollout,), timeout=LAST_WORD_S)
            columns = rollout.result() if rollout.done() else {}
        except EpisodeFailed:
            if not episode.over.is_set():
                raise
            columns = {}  # told that it was over, it need not return anything
        finally:
            self._server.end(key)
            episode.close()
            for task in (rollout, over):
                task.cancel()
            await asyncio.gather(rollout, over, return_exceptions=True)
        if not episode.transcript.turns:
            raise EpisodeFailed("the environment returned before its client had an answer: there is nothing to train")
        return columns

    def _columns(
        self, transcripts: Sequence[Transcript], returned: Sequence[dict[str, float]]
    ) -> dict[str, NDArray[np.float32]]:
        """What the episodes returned, as stage columns [n]; the same names for all samples."""
        whole = [columns for t, columns in zip(transcripts, returned, strict=True) if columns or not t.interrupted]
        names = set(whole[0]) if whole else set[str]()
        if any(set(columns) != names for columns in whole):
            said = " and ".join(sorted({", ".join(sorted(columns)) or "None" for columns in whole}))
            raise EpisodeFailed(f"the environment must return the same for all samples of a group; it returned {said}")
        if not self._rewarded and REWARD not in names:
            if whole:
                raise EpisodeFailed("the environment returned no reward, and there is no reward.run")
            names = {REWARD}
        return {
            f"{ENVIRONMENT}{name}": np.array([columns.get(name, 0.0) for columns in returned], np.float32)
            for name in sorted(names)
        }
