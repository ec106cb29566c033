# pyright: basic, reportMissingImports=false
"""Any environment of OpenEnv, unchanged, on servers that run elsewhere: the policy's answers are its actions.

Each episode has a session of its own. The first observation is the first message, each answer of the policy becomes an
action, and each further observation a message. The reward is the sum of the rewards of the steps.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

from staleflow.clients.rollout.episodes.env_client import ChatError, Client
from staleflow.examples.environments.openenv_session import (
    Result,
    Server,
    ServerError,
    Session,
    Unavailable,
    base_urls,
)
from staleflow.examples.environments.openenv_texts import KEY, action_maker, observation_reader

RESET = "reset"
"""Column with the arguments of the environment's reset, a table or its JSON: a seed, or a split and an index."""

INVALID = "VALIDATION_ERROR"
"""Code of a server's refusal of an action whose fields do not fit."""

LIMITS = ("episode_over", "context_length_exceeded", "max_turns")
"""Codes of rejected calls that end an episode early, with the rewards so far."""

MIN_PAUSE_S, MAX_PAUSE_S = 0.05, 2.0
"""Time between two tries to get a session: doubled after each."""

LAST_S = 5.0
"""Time for which a server that is full or away is tried last: it has the fewest episodes, but may be slow to fail."""


class OpenEnv:
    """Rows need ``reset``, as ``prompts`` and ``held_out`` return it."""

    def __init__(
        self,
        base_url: str | list[str],
        action: str = "",
        observation: str = "",
        first_message: Literal["observation", "prompt"] = "observation",
        system: str = "",
        role: str = "user",
        max_turns: int = 0,
        invalid_reward: float = 0.0,
        step_timeout_s: float = 30.0,
        session_timeout_s: float = 30.0,
    ) -> None:
        """Check that a server can be reached. ``ValueError`` names the option that is wrong.

        ``base_url``: a server, or several equal ones; an episode is played by the one that has the fewest.
        ``action``: the action's field that gets the text of an answer; or ``module:function`` from the text to the
        action, whose ``ValueError`` makes it invalid. Default: the only field that an action requires.
        ``observation``: the observation's field that becomes a message; or ``module:function`` from the observation to
        the text. Default: the only field of text.
        ``first_message``: the observation of the reset, or the row's ``prompt``.
        ``system``: a system message before it, when there is one. ``role``: of the messages with later observations.
        ``max_turns``: answers of the policy in one episode; 0 sets no limit other than the environment's.
        ``invalid_reward``: added for an action that the environment refuses, which ends the episode.
        ``step_timeout_s``: seconds of one reset or step; after them the episode fails.
        ``session_timeout_s``: seconds to wait for a server with a free session; after them the episode fails.
        """
        if first_message not in ("observation", "prompt"):
            raise ValueError(f'{KEY}.first_message={first_message!r}; it must be "observation" or "prompt"')
        if max_turns < 0:
            raise ValueError(f"{KEY}.max_turns={max_turns}; it must be at least 0")
        for name, seconds in (("step_timeout_s", step_timeout_s), ("session_timeout_s", session_timeout_s)):
            if not seconds > 0:
                raise ValueError(f"{KEY}.{name}={seconds}; it must be above 0")
        urls = base_urls(base_url, f"{KEY}.base_url")
        self.playing = dict.fromkeys(urls, 0)
        """Number of episodes on each server."""
        self._last_until = dict[str, float]()
        """Time until which a server that had no session is tried last."""
        actions, observations = _schemas(urls)
        self._to_action = action_maker(action, actions)
        self._to_text = observation_reader(observation, observations)
        self._before = [{"role": "system", "content": system}] if system else []
        self._from_prompt, self._role = first_message == "prompt", role
        self._max_turns, self._invalid_reward = max_turns or sys.maxsize, invalid_reward
        self._step_timeout_s, self._session_timeout_s = step_timeout_s, session_timeout_s

    async def rollout(self, client: Client, row: Mapping[str, Any]) -> dict[str, float]:
        """Play one episode.

        ``reward``: the sum of the environment's rewards; ``turns``: the number of answers; ``done``: 1 if the
        environment ended the episode; ``invalid``: 1 if an answer was no valid action.
        """
        numbers = {"reward": 0.0, "turns": 0.0, "done": 0.0, "invalid": 0.0}
        async with self._session(_reset_arguments(row)) as (session, result):
            first = row["prompt"] if self._from_prompt else self._to_text(result.observation)
            messages: list[Any] = [*self._before, {"role": "user", "content": first}]
            while not result.done and numbers["turns"] < self._max_turns:
                try:
                    reply = await client.chat.completions.create(messages=messages)
                except ChatError as error:
                    if error.code not in LIMITS:
                        raise
                    break
                numbers["turns"] += 1
                answer = reply.choices[0].message
                stepped = await self._step(session, answer.content or "")
                if stepped is None:
                    numbers["reward"] += self._invalid_reward
                    numbers["invalid"] = 1.0
                    break
                result = stepped
                numbers["reward"] += float(result.reward or 0.0)
                messages += [answer, {"role": self._role, "content": self._to_text(result.observation)}]
            numbers["done"] = float(result.done)
        return numbers

    async def _step(self, session: Session, text: str) -> Result | None:
        """Take the action that an answer means; None if it is no valid one."""
        try:
            action = dict(self._to_action(text))
        except ValueError:
            return None
        try:
            return await session.step(action)
        except ServerError as error:
            if error.code != INVALID:
                raise
            return None

    @asynccontextmanager
    async def _session(self, arguments: dict[str, Any]) -> AsyncIterator[tuple[Session, Result]]:
        session, result = await self._begin(arguments)
        try:
            yield session, result
        finally:
            self.playing[session.url] -= 1
            await session.close()

    async def _begin(self, arguments: dict[str, Any]) -> tuple[Session, Result]:
        """Open and reset a session. Wait while all servers are full or away; it costs no tokens yet."""
        give_up = time.monotonic() + self._session_timeout_s
        pause_s = MIN_PAUSE_S
        while True:
            errors: list[Unavailable] = []
            for url in sorted(self.playing, key=self._order):
                self.playing[url] += 1  # at once, so that concurrent episodes choose other servers
                try:
                    return await Session.begin(url, arguments, self._step_timeout_s)
                except BaseException as error:
                    self.playing[url] -= 1
                    if not isinstance(error, Unavailable):
                        raise
                    self._last_until[url] = time.monotonic() + LAST_S
                    errors.append(error)
            if time.monotonic() > give_up:
                raise errors[-1]
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _order(self, url: str) -> tuple[bool, int, float]:
        """Sort servers by their episodes, those that had no session for others a moment ago last."""
        return self._last_until.get(url, 0.0) > time.monotonic(), self.playing[url], random.random()


def prompts(
    seed: int,
    *,
    base_url: str | list[str],
    split: str = "",
    eval_split: str = "",
    tasks: int = 1000,
    eval_tasks: int = 100,
) -> list[dict[str, str]]:
    """Return a row for each task of ``split``; without a split, for the seeds below ``tasks``."""
    return _tasks(base_url, "split", split) if split else _seeds(0, tasks)


def held_out(
    seed: int,
    *,
    base_url: str | list[str],
    split: str = "",
    eval_split: str = "",
    tasks: int = 1000,
    eval_tasks: int = 100,
) -> list[dict[str, str]]:
    """Return a row for each task of ``eval_split``; without a split, for ``eval_tasks`` other seeds."""
    return _tasks(base_url, "eval_split", eval_split) if split or eval_split else _seeds(tasks, tasks + eval_tasks)


def _tasks(base_url: str | list[str], option: str, split: str) -> list[dict[str, str]]:
    url, *_ = base_urls(base_url, "prompts.options.base_url")
    try:
        number = Server(url).num_tasks(split)
    except ServerError as error:
        raise ValueError(f"prompts.options.{option}={split!r} has no tasks: {error}") from error
    return [
        {"prompt": f"{split} {index}", RESET: json.dumps({"split": split, "index": index})} for index in range(number)
    ]


def _seeds(start: int, stop: int) -> list[dict[str, str]]:
    return [{"prompt": f"seed {seed}", RESET: json.dumps({"seed": seed})} for seed in range(start, stop)]


def _schemas(urls: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the schemas of actions and observations. The servers are equal, and one of them may be away."""
    errors: list[ServerError] = []
    for url in urls:
        try:
            return Server(url).schemas()
        except ServerError as error:
            errors.append(error)
    causes = "; ".join(map(str, errors))
    raise ValueError(f"{KEY}.base_url: {causes}; start the environment's server, or correct the URL")


def _reset_arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    if RESET not in row:
        raise ValueError(f'the row has no column "{RESET}"; set prompts.source to {__name__}:prompts, or add it')
    arguments = json.loads(row[RESET]) if isinstance(row[RESET], str) else row[RESET]
    if not isinstance(arguments, Mapping):
        raise ValueError(f'column "{RESET}" is {row[RESET]!r:.80}; it must be a table of arguments, or its JSON')
    return dict(arguments)
