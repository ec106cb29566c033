"""The reward stage: takes pushed groups from the trajectory servers, scores them, hands the columns back.

Consumes: ``StageWork`` of each shard, as soon as it has some. Produces: one ``StageResult`` a group, a float32 column
``reward`` or the reason why there is none. A worker that dies owes nothing: the shard gives its groups to another one,
and the ticket fences what it may still say.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.stage.runner import RewardFailed, RewardRunner, Sample
from staleflow.clients.stage.texts import Decode
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import FinishStage, Results, StageItem, StageResult, StageWork, TakeStage
from staleflow.protocols.wire.tensors import arrays, specs_and_frames
from staleflow.protocols.wire.trajectory import GroupPayload
from staleflow.runtime.client import Client

log = logging.getLogger(__name__)

STAGE = "reward"
COLUMN = "reward"
TAKE_WAIT_MS = 2000
AT_ONCE_S = 0.2


@dataclass(slots=True)
class Scored:
    """What a worker did so far."""

    groups: int = 0
    failed: int = 0


class RewardWorker:
    """Serves one stage at every shard; the runner is shared, so shards wait for each other only inside it."""

    def __init__(self, *, worker: WorkerId, runner: RewardRunner, decode: Decode, max_groups: int) -> None:
        self._worker = worker
        self._runner = runner
        self._decode = decode
        self._max_groups = max_groups
        self.scored = Scored()

    async def serve(self, shards: Sequence[Client]) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for shard in shards:
                tasks.create_task(self._serve_shard(shard))

    async def _serve_shard(self, shard: Client) -> None:
        take = TakeStage(stage=STAGE, worker=self._worker, max_groups=self._max_groups, wait_ms=TAKE_WAIT_MS)
        while True:
            asked = time.monotonic()
            work, frames = await shard.call(take, timeout_s=None)
            if isinstance(work, StageWork) and work.items:
                await self._finish(shard, work.items, frames)
            elif time.monotonic() - asked < AT_ONCE_S:  # a shard that drains has nothing and does not wait either
                await asyncio.sleep(AT_ONCE_S)

    async def _finish(self, shard: Client, items: Sequence[StageItem], frames: Sequence[memoryview]) -> None:
        """Score the groups side by side and hand them back together."""
        start, scoring = 0, list[asyncio.Task[tuple[StageResult, list[memoryview]]]]()
        async with asyncio.TaskGroup() as tasks:
            for item in items:
                end = start + len(item.frames)
                scoring.append(tasks.create_task(self._score(item, frames[start:end])))
                start = end
        done = [task.result() for task in scoring]
        finish = FinishStage(stage=STAGE, worker=self._worker, results=[result for result, _ in done])
        answer = await shard.ask(finish, Results, [f for _, columns in done for f in columns], timeout_s=None)
        self._count(finish.results, answer)

    async def _score(self, item: StageItem, frames: Sequence[memoryview]) -> tuple[StageResult, list[memoryview]]:
        error, columns = "", dict[str, NDArray[np.float32]]()
        try:
            payload = GroupPayload.from_arrays(arrays(item.frames, frames))
            rewards = await self._runner.score(samples(item.row, self._decode(completions(payload))))
            columns[COLUMN] = np.asarray(rewards, np.float32)
        except (RewardFailed, ProtocolError) as failed:
            error = str(failed)
            log.error("group %d has no reward: %s", item.group, error)
        specs, out = specs_and_frames(columns)
        return (
            StageResult(group=item.group, lease=item.lease, ticket=item.ticket, frames=specs, error=error),
            out,
        )

    def _count(self, results: Iterable[StageResult], answer: Results) -> None:
        for result, outcome in zip(results, answer.results, strict=True):
            self.scored.groups += 1
            self.scored.failed += bool(result.error)
            if outcome.code is not None:
                log.info("group %d: %s %s", result.group, outcome.code, outcome.detail)


def completions(payload: GroupPayload) -> list[NDArray[np.int32]]:
    """The completion tokens of each sample (views)."""
    return np.split(payload.token_ids, np.cumsum(payload.lengths)[:-1])


def samples(row: dict[str, Any], texts: Sequence[str]) -> list[Sample]:
    """What the reward is called with: the row's prompt, one completion, and the row's other columns."""
    columns = {name: value for name, value in row.items() if name not in ("prompt", "completion")}
    prompt = row.get("prompt", "")
    prompt = prompt if isinstance(prompt, str) else str(prompt)
    return [Sample(prompt=prompt, completion=text, columns=columns) for text in texts]
