"""Groups whose trajectories are episodes of user code: ``groups.produce`` with an environment in between.

One sample is one episode, and the episodes of a group run concurrently. An episode's calls arrive through the
``ChatServer``, one at a time. Each call is one request to the engine after the exact tokens so far
(``chat/conversation.py``), and one turn of the transcript. An error of the environment costs only its group.

- interrupt: the current turn ends with its tokens so far and is answered. The next call is rejected
  (``episode_over``), and the environment has ``RETURN_TIMEOUT_S`` to return. An episode without tokens generates at
  least one. Numbers that it did not return are 0 if other episodes of its group returned them.
- abort: the current turn is aborted and the episode is cancelled in its process.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.rollout.engines.base import AsyncEngine, Request, RequestError, Sampling, Trajectory
from staleflow.clients.rollout.episodes.chat.calls import ChatAnswer, ChatCall, ChatRefused, parse, reply
from staleflow.clients.rollout.episodes.chat.conversation import Conversation
from staleflow.clients.rollout.episodes.chat.server import ChatServer
from staleflow.clients.rollout.episodes.chat.template import ChatTemplate
from staleflow.clients.rollout.episodes.chat.transcript import Transcript, Turn, cut, group_payload
from staleflow.clients.rollout.episodes.env_child import REWARD
from staleflow.clients.rollout.episodes.env_runner import EnvironmentRunner, EpisodeFailed
from staleflow.clients.rollout.groups import ActiveLease, Recipe, first_ended, request_id
from staleflow.clients.user_code.process import Killed
from staleflow.configs.rewards import components
from staleflow.configs.schema import Config
from staleflow.protocols.wire.stages import ENVIRONMENT
from staleflow.protocols.wire.trajectory import Finish, GroupPayload

log = logging.getLogger(__name__)

RETURN_TIMEOUT_S = 5.0
"""Time between an interrupt and the forced end of an episode that does not return."""


class Episode:
    """The worker's side of one call of ``rollout``: serve the episode's chat calls and keep the transcript."""

    def __init__(
        self, engine: AsyncEngine, template: ChatTemplate, sampling: Sampling, *, seed: int, max_turns: int
    ) -> None:
        self.transcript = Transcript()
        self.over = asyncio.Event()
        """Set once the episode was interrupted and has its tokens."""
        self._engine = engine
        self._template = template
        self._sampling = sampling
        self._seed = seed
        self._max_turns = max_turns
        self._conversation = Conversation(template)
        self._request: int | None = None
        self._generating: asyncio.Future[Trajectory] | None = None

    async def answer(self, route: str, body: object) -> dict[str, Any]:
        """Serve one chat call. ``ChatRefused`` leaves the episode unchanged."""
        call, transcript = parse(route, body, self._sampling), self.transcript
        if self._request is not None:
            raise ChatRefused("another call of this episode is in progress; calls must be sequential", "busy")
        if transcript.interrupted and transcript.turns:
            raise ChatRefused("the episode was interrupted", "episode_over")
        if self._max_turns and len(transcript.turns) >= self._max_turns:
            raise ChatRefused(f"environment.max_turns is {self._max_turns}", "max_turns")
        so_far = transcript.token_ids
        ended_itself = bool(transcript.turns) and _ended_itself(transcript.turns[-1])
        given = self._conversation.given(call.prompt, so_far, ended_itself=ended_itself)
        trajectory = await self._generate(np.concatenate([so_far, given]), call)
        turn, text = self._cut(given, trajectory, call.stop or self._sampling.stop)
        transcript.turns.append(turn)
        self._conversation.record(call.prompt, text)
        if transcript.interrupted:
            self.over.set()
        return self._reply(route, call, turn, text, len(so_far) + len(given))

    def interrupt(self) -> None:
        """End with the tokens so far, at least one."""
        self.transcript.interrupted = True
        if self._request is not None:
            self._engine.interrupt(self._request)
        elif self.transcript.turns:
            self.over.set()

    def close(self) -> None:
        """Abort the current turn, if any."""
        if self._generating is not None:
            self._generating.cancel()

    async def _generate(self, prompt_ids: NDArray[np.int32], call: ChatCall) -> Trajectory:
        seed = np.random.SeedSequence((self._seed, len(self.transcript.turns))).generate_state(1, np.uint64)[0]
        stop = call.stop or self._sampling.stop
        sampling = replace(self._sampling, max_new_tokens=call.max_tokens, stop=stop)
        self._request = request_id()
        request = Request(id=self._request, prompt_ids=prompt_ids, sampling=sampling, seed=int(seed))
        generating = self._generating = asyncio.ensure_future(self._engine.generate(request))
        try:
            if self.transcript.interrupted:
                await asyncio.sleep(0)  # let the task submit its request: the engine ignores unknown ids
                self._engine.interrupt(request.id)
            return await generating
        except RequestError as error:
            raise ChatRefused(str(error), "context_length_exceeded") from error
        finally:
            generating.cancel()
            self._request = None

    def _cut(self, given: NDArray[np.int32], trajectory: Trajectory, stops: Sequence[str]) -> tuple[Turn, str]:
        """Return the turn and its text, cut at the first stop string.

        The end of a text is a function of the tokens up to there, so later tokens can be discarded without changing the
        probabilities of the earlier ones. An engine without a tokenizer generates them first.
        """
        token_ids, text = trajectory.token_ids, self._template.text(trajectory.token_ids)
        if not any(stop in text for stop in stops):
            return Turn(given=given, segments=trajectory.segments, finish=trajectory.finish), text
        # Binary search for the first token after which the text contains a stop string.
        low, high = 1, len(token_ids)
        while low < high:
            middle = (low + high) // 2
            written = self._template.text(token_ids[:middle])
            low, high = (low, middle) if any(stop in written for stop in stops) else (middle + 1, high)
        text = self._template.text(token_ids[:low])
        text = text[: min(text.index(stop) for stop in stops if stop in text)]
        return Turn(given=given, segments=cut(trajectory.segments, low), finish=Finish.STOP, by_text=True), text

    def _reply(self, route: str, call: ChatCall, turn: Turn, text: str, prompt_tokens: int) -> dict[str, Any]:
        token_ids = turn.token_ids
        answer = ChatAnswer(
            text=text,
            token_ids=token_ids.tolist(),
            tokens=[self._template.text(token_ids[n : n + 1]) for n in range(len(token_ids))] if call.logprobs else [],
            logprobs=turn.logprobs.tolist() if call.logprobs else [],
            stopped=turn.finish is Finish.STOP,
            prompt_tokens=prompt_tokens,
        )
        return reply(route, call, answer, number=len(self.transcript.turns), created=int(time.time()))


def _ended_itself(turn: Turn) -> bool:
    """Return whether the turn's last token is a stop token."""
    return turn.finish is Finish.STOP and not turn.by_text


class Environments:
    """Everything that lets an environment generate groups with an engine. Create it inside a running event loop."""

    def __init__(self, config: Config, engine: AsyncEngine, template: ChatTemplate, recipe: Recipe) -> None:
        self._engine = engine
        self._template = template
        self._recipe = recipe
        self._max_turns = config.environment.max_turns
        self._rewarded = bool(components(config.reward))
        self._runner = EnvironmentRunner(config.environment)
        self._server = ChatServer()

    async def start(self) -> None:
        """Start the processes and the server. ``ConfigError`` if the class cannot be imported or instantiated."""
        await self._runner.start()
        await self._server.start()

    async def close(self) -> None:
        await self._runner.close()
        await self._server.close()

    @property
    def under_way(self) -> int:
        """Return the number of running episodes."""
        return self._runner.under_way

    @property
    def waiting(self) -> int:
        """Return the number of episodes that wait for a process."""
        return self._runner.waiting

    async def produce(self, active: ActiveLease, row: Mapping[str, Any]) -> GroupPayload:
        """Return the group's first ``group_size`` episodes to end. ``EpisodeFailed`` if one of them has no result."""
        recipe, playing = self._recipe, dict[int, Episode]()

        def interrupt() -> None:
            for episode in playing.values():
                episode.interrupt()

        active.on_interrupt = interrupt

        async def play(sample: int) -> tuple[int, dict[str, float]]:
            def opened(episode: Episode) -> None:
                playing[sample] = episode
                if active.interrupted:
                    episode.interrupt()

            return sample, await self._play(row, recipe.sample_seed(active.assign, sample), opened)

        tasks = [asyncio.ensure_future(play(sample)) for sample in range(recipe.started)]
        done = sorted(await first_ended(tasks, recipe.group_size), key=lambda ended: ended[0])
        transcripts = [playing[sample].transcript for sample, _ in done]
        return group_payload(transcripts, self._columns(transcripts, [columns for _, columns in done]))

    async def episode(self, row: Mapping[str, Any], seed: int) -> GroupPayload:
        """Run one episode without a lease, as a group of one sample. ``EpisodeFailed`` if it has no result."""
        opened: list[Episode] = []
        columns = await self._play(row, seed, opened.append)
        transcripts = [opened[-1].transcript]
        return group_payload(transcripts, self._columns(transcripts, [columns]))

    async def _play(self, row: Mapping[str, Any], seed: int, opened: Callable[[Episode], None]) -> dict[str, float]:
        """Return the result of ``rollout`` for one episode.

        ``opened`` receives the episode, and again after another episode killed the process. The repetition starts
        over with the same seed. The engine has counted the tokens of the lost run, but no group has them: they show
        as generated and not trained.
        """
        suspicion = 0
        while True:
            episode = Episode(self._engine, self._template, self._recipe.sampling, seed=seed, max_turns=self._max_turns)
            opened(episode)
            try:
                return await self._played(episode, row, suspicion)
            except Killed as killed:
                if episode.over.is_set():  # it has its tokens; only the environment's return value is missing
                    return {}
                suspicion += killed.suspicion

    async def _played(self, episode: Episode, row: Mapping[str, Any], suspicion: int) -> dict[str, float]:
        key = self._server.open(episode.answer)
        rollout = asyncio.ensure_future(self._runner.play(self._server.base_url, key, row, suspicion))
        over = asyncio.ensure_future(episode.over.wait())
        try:
            await asyncio.wait((rollout, over), return_when=asyncio.FIRST_COMPLETED)
            if not rollout.done():
                await asyncio.wait((rollout,), timeout=RETURN_TIMEOUT_S)
            columns = rollout.result() if rollout.done() else {}
        except EpisodeFailed:
            if not episode.over.is_set():
                raise
            columns = {}  # after an interrupt the environment does not have to return anything
        finally:
            self._server.end(key)
            episode.close()
            for task in (rollout, over):
                task.cancel()
            await asyncio.gather(rollout, over, return_exceptions=True)
        if not episode.transcript.turns:
            raise EpisodeFailed("the environment returned before its first answer; there is nothing to train")
        return columns

    def _columns(
        self, transcripts: Sequence[Transcript], returned: Sequence[dict[str, float]]
    ) -> dict[str, NDArray[np.float32]]:
        """Return the episodes' results as stage columns [n], with the same names for all samples."""
        whole = [columns for t, columns in zip(transcripts, returned, strict=True) if columns or not t.interrupted]
        names = set(whole[0]) if whole else set[str]()
        if any(set(columns) != names for columns in whole):
            returned_names = " and ".join(sorted({", ".join(sorted(columns)) or "None" for columns in whole}))
            raise EpisodeFailed(
                f"the environment must return the same for all samples of a group; it returned {returned_names}"
            )
        if not self._rewarded and REWARD not in names:
            if whole:
                raise EpisodeFailed("the environment returned no reward, and there is no reward.run")
            names = {REWARD}
        return {
            f"{ENVIRONMENT}{name}": np.array([columns.get(name, 0.0) for columns in returned], np.float32)
            for name in sorted(names)
        }
