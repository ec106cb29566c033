"""Evaluations by a rollout worker: play prompts with its engine at a pinned version, beside the groups of its leases.

The engine loads no other weights while an evaluation plays (``wait_for``), so that one version writes every token. Each
evaluation starts processes for the reward and its stages, and ends them afterwards.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from staleflow.clients.evaluation.player import OtherVersion, SetPlayer, Weights
from staleflow.clients.evaluation.scorer import open_scorer
from staleflow.clients.prompts import Encode
from staleflow.clients.rollout.engines.base import AsyncEngine, EngineError
from staleflow.clients.rollout.episodes.environment import Environments
from staleflow.clients.rollout.pulls import Pulls
from staleflow.clients.texts import Decode
from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config
from staleflow.net.client import Client
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import Done, Evaluate, PromptScores, PutScores

log = logging.getLogger(__name__)

MAX_UNSENT_NUMBERS = 4096
"""Number of rewards and other numbers from which scores are sent, before the evaluation has finished."""
SEND_INTERVAL_S = 1.0
"""Time after which scores are sent."""


class Evaluator:
    """Plays one evaluation at a time, the newest that was ordered. Belongs to one event loop."""

    def __init__(
        self,
        config: Config,
        me: WorkerId,
        scheduler: Client,
        engine: AsyncEngine,
        encode: Encode,
        decode: Decode,
        environments: Environments | None,
        rows: Sequence[Sequence[dict[str, Any]]],
    ) -> None:
        """``rows``: the prompts of each set of the configuration."""
        self._config = config
        self._me = me
        self._scheduler = scheduler
        self._engine = engine
        self._encode = encode
        self._decode = decode
        self._environments = environments
        self._rows = rows
        self.ticket = 0
        """Ticket of the evaluation in progress; 0: none."""
        self._task: asyncio.Task[None] | None = None
        self._pinned: Weights | None = None
        """Weights with which samples are being played."""
        self._idle = asyncio.Event()
        self._idle.set()
        self.sampled_tokens = 0
        """Tokens of all finished samples."""

    @property
    def num_prompts(self) -> list[int]:
        """Number of prompts of each set."""
        return [len(rows) for rows in self._rows]

    def start(self, command: Evaluate, pulls: Pulls) -> "asyncio.Task[None]":
        """Play an evaluation in place of the one in progress; return its task."""
        self.end(self.ticket)
        self.ticket = command.ticket
        self._task = asyncio.ensure_future(self._run(command, pulls, self._task))
        return self._task

    def end(self, ticket: int) -> None:
        """Discard the evaluation with this ticket, if it is in progress."""
        if ticket and ticket == self.ticket:
            self.ticket = 0
            if self._task is not None:
                self._task.cancel()

    async def wait_for(self, weights: Weights) -> None:
        """Wait until no sample is being played with other weights than these."""
        while self._pinned not in (None, weights):
            await self._idle.wait()

    async def _run(self, command: Evaluate, pulls: Pulls, before: "asyncio.Task[None] | None") -> None:
        """Play once ``before``, the discarded evaluation, has released the engine."""
        if before is not None:
            await asyncio.wait((before,))
        weights = (command.lineage, command.version)
        failure, unsent = "", list[PromptScores]()
        try:
            try:
                if await pulls.wait_exactly(*weights):
                    await self._play(command, weights, unsent)
                else:
                    failure = f"version {command.version} is not loaded"
            except (ConfigError, OtherVersion, EngineError) as error:
                failure = str(error)
            await self._send(command.ticket, unsent, failure)
        except Refused as refused:
            log.info("evaluation %s at version %d is over: %s", command.set, command.version, refused)
        self.ticket = 0

    async def _play(self, command: Evaluate, weights: Weights, unsent: list[PromptScores]) -> None:
        """Play the prompts; scores that are not sent yet are in ``unsent``, also after an error."""
        place = next(place for place, given in enumerate(self._config.eval) if given.name == command.set)
        given, rows = self._config.eval[place], self._rows[place]
        clock = asyncio.get_running_loop().time
        sent_s, before = clock(), self.sampled_tokens
        log.info("plays %d prompts of evaluation %s at version %d", len(command.prompts), command.set, command.version)
        self._pinned = weights
        self._idle.clear()
        try:
            async with open_scorer(self._config, self._decode) as scorer:
                player = SetPlayer(
                    self._config,
                    given,
                    rows,
                    engine=self._engine,
                    encode=self._encode,
                    environments=self._environments,
                    scorer=scorer,
                    pinned=weights,
                )
                async with aclosing(player.play(command.prompts)) as playing:
                    async for scores in playing:
                        self.sampled_tokens = before + player.sampled_tokens
                        unsent.append(scores)
                        if _numbers(unsent) >= MAX_UNSENT_NUMBERS or clock() >= sent_s + SEND_INTERVAL_S:
                            await self._send(command.ticket, unsent)
                            unsent.clear()
                            sent_s = clock()
        finally:
            self._pinned = None
            self._idle.set()

    async def _send(self, ticket: int, scores: Sequence[PromptScores], failure: str = "") -> None:
        message = PutScores(worker=self._me, ticket=ticket, scores=list(scores), failure=failure)
        await self._scheduler.ask(message, Done, timeout_s=None)


def _numbers(scores: Sequence[PromptScores]) -> int:
    return sum(len(one.rewards) * (2 + len(one.numbers)) for one in scores)
