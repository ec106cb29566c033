"""One rollout instance of a run: an engine, or environments that call it, behind the leases of ``LeaseSession``.

Consumes prompt rows and versions; produces groups. An engine that takes long over one step renews no lease meanwhile.
"""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.evaluation.evaluator import Evaluator
from staleflow.clients.prompts import Encode, prompt_of
from staleflow.clients.rollout.engines.base import AsyncEngine, ColumnError, RequestError
from staleflow.clients.rollout.episodes.env_runner import EpisodeFailed
from staleflow.clients.rollout.episodes.environment import Environments
from staleflow.clients.rollout.groups import ActiveLease, GroupSamples, PartialGroup, Recipe, interrupt, leave
from staleflow.clients.rollout.session import REPORT_INTERVAL_S, GiveUp, LeaseSession
from staleflow.clients.rollout.transfers import hand_over
from staleflow.clients.weights import PulledVersion, Puller
from staleflow.net.client import Client
from staleflow.protocols.consistency.ids import Lineage, Version, WorkerId
from staleflow.protocols.wire.messages import InstanceStats, Result
from staleflow.protocols.wire.trajectory import GroupPayload

log = logging.getLogger(__name__)


class RowError(Exception):
    """The prompt row is invalid."""


class Worker:
    """Serves leases with an engine. Create and use it inside one event loop."""

    def __init__(
        self,
        me: WorkerId,
        scheduler: Client,
        shards: list[Client],
        puller: Puller,
        engine: AsyncEngine,
        encode: Encode,
        recipe: Recipe,
        environments: Environments | None = None,
        *,
        evaluator: Evaluator | None = None,
        report_s: float = REPORT_INTERVAL_S,
    ) -> None:
        self._me = me
        self._scheduler = scheduler
        self._shards = shards
        self._engine = engine
        self._encode = encode
        self._recipe = recipe
        self._environments = environments
        self._evaluator = evaluator
        self.failure = engine.failure
        self._session = LeaseSession(
            me, scheduler, shards, puller, self, recipe, evaluator=evaluator, report_s=report_s
        )
        self.counts = self._session.counts

    async def run(self) -> None:
        """Work until the run has drained, or raise the error that ended it. To stop early, cancel, then ``leave``."""
        await self._session.run()

    async def hand_over(self, timeout_s: float) -> None:
        """Hand the groups over to other workers; return once none is left here, or after ``timeout_s``."""
        await self._session.hand_over(timeout_s)

    async def leave(self, why: str) -> None:
        """Stop, wait briefly for finished groups to arrive, and detach; the scheduler releases the remaining leases."""
        await self._session.leave(why)

    # --- the session's producer ---

    async def produce(
        self, active: ActiveLease, row: Mapping[str, Any], partial: PartialGroup | None
    ) -> GroupPayload | None:
        """Return the group once its samples have ended; None if it continues elsewhere."""
        try:
            if self._environments is not None:
                return await self._environments.produce(active, row)
            return await self._generate(active, self._prompt_ids(row), partial)
        except (RowError, RequestError) as error:
            raise GiveUp(str(error), hopeless=True) from error
        except (ColumnError, EpisodeFailed) as error:
            raise GiveUp(f"at {self._me}, {error}") from error

    def interrupt(self, active: ActiveLease) -> None:
        """Finish a group with the tokens so far."""
        interrupt(self._engine, active)

    def leave_group(self, active: ActiveLease) -> None:
        """Stop a group so that another instance continues it; an episode cannot leave its process."""
        if self._environments is None:
            leave(self._engine, active)

    def settled(self, active: ActiveLease, result: Result) -> None:
        """Do nothing: the session handles the result of a push."""

    def stats(self, fetching: int) -> InstanceStats:
        """Return the engine's numbers. Samples of groups without a row count as waiting."""
        stats, environments = self._engine.stats(), self._environments
        return InstanceStats(
            running=stats.running,
            waiting=stats.waiting + fetching * self._recipe.started,
            kv_used=stats.kv_used,
            kv_tokens=stats.kv_tokens,
            kv_capacity=stats.kv_capacity,
            slots=stats.slots,
            tokens_per_s=self._engine.tokens_per_s(),
            generated_tokens=stats.generated_tokens,
            steps=stats.steps,
            busy_s=self._engine.busy_s(),
            paused_s=stats.paused_s,
            episodes=environments.under_way if environments is not None else 0,
            episodes_waiting=environments.waiting if environments is not None else 0,
            evaluated_tokens=self._evaluator.sampled_tokens if self._evaluator is not None else 0,
        )

    def stuck_s(self) -> float:
        """Return the duration of the engine's current step."""
        return self._engine.stuck_s()

    async def load(self, lineage: Lineage, version: Version, weights: PulledVersion) -> None:
        """Load weights into the engine between two of its steps, and after an evaluation that plays with others."""
        if self._evaluator is not None:
            await self._evaluator.wait_for((lineage, version))
        await self._engine.load(weights.arrays(), lineage, version)

    # --- groups ---

    async def _generate(
        self, active: ActiveLease, prompt_ids: NDArray[np.int32], partial: PartialGroup | None
    ) -> GroupPayload | None:
        """Return the group once its samples have ended; None if it continues elsewhere.

        Samples started by newer weights than the loaded ones start over, since versions never decrease in a sample.
        """
        pulls = self._session.pulls
        if partial is not None and (newest := partial.newest()) and not await pulls.wait_loaded(*newest):
            partial = None
        try:
            return await self._run_samples(active, prompt_ids, partial)
        except RequestError as error:
            if partial is None:
                raise
            log.warning("group %d starts over without the samples of another worker: %s", active.assign.group, error)
            return await self._run_samples(active, prompt_ids, None)

    async def _run_samples(
        self, active: ActiveLease, prompt_ids: NDArray[np.int32], partial: PartialGroup | None
    ) -> GroupPayload | None:
        samples = GroupSamples(self._engine, active, prompt_ids, self._recipe, partial)
        while not await samples.run():
            shard, any_target = self._shards[active.assign.shard], self._session.leaving
            if await hand_over(active.assign, samples.partial(), shard, self._scheduler, any_target=any_target):
                return None
            active.leaving = False
        return samples.payload()

    def _prompt_ids(self, row: Mapping[str, Any]) -> NDArray[np.int32]:
        prompt = prompt_of(row)
        if prompt is None:
            raise RowError(f"its prompt is {type(row.get('prompt')).__name__}, not text")
        try:
            return self._encode(prompt)
        except ValueError as error:
            raise RowError(str(error)) from error
