"""A stage worker in a real service returns good groups, reports bad ones, and loses no group when it dies."""

import asyncio
import re
import signal
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from staleflow.clients.stage.worker import StageGroup, StageOutcome, StageWorker
from staleflow.clients.trainer.client import TrainerClient
from staleflow.net import adaptive_chunks as portions
from staleflow.net.adaptive_chunks import FIRST_BYTES
from staleflow.protocols.consistency.ids import LeaseId, Lineage, Version, WorkerId
from staleflow.protocols.wire.messages import (
    GetStageWork,
    Pong,
    PutStageResults,
    Request,
    Result,
    Results,
    StageItem,
    StageWork,
)
from staleflow.protocols.wire.payload_digest import payload_digest
from staleflow.protocols.wire.tensors import pack
from tests.clients.stage.judged import group
from tests.clients.trainer.service import REWARDS, Service, serving

WEIGHTS = {"w": np.zeros(3, np.float32)}


def trained_prompts(service: Service, steps: int) -> set[str]:
    """Return the prompts of the next steps' batches, trained and committed."""
    prompts: set[str] = set()
    with TrainerClient(service.address) as trainer:
        attached = trainer.attach()
        if trainer.join(attached.lineage, Version(max(attached.version, 0))).version < 0:
            trainer.publish_initial(WEIGHTS)
        for batch in trainer.batches(trainer.version + steps):
            prompts |= {row["prompt"] for row in batch.rows}
            trainer.commit(WEIGHTS)
    return prompts


def test_a_group_whose_reward_fails_is_released_with_the_reason_and_training_goes_on() -> None:
    with serving(f"reward.run={REWARDS}:picky", "reward.retries=1") as service:
        prompts = trained_prompts(service, 12)
        assert len(prompts) > 20
        assert not any(prompt.endswith("7") for prompt in prompts)
        log = (service.run_dir / "logs" / "reward-0.log").read_text()
        failed = re.findall(r"group (\d+) has no reward: the reward raised ValueError: cannot judge p\d*7", log)
        reasons = {event["why"] for event in service.trace("release") if str(event["group"]) in failed}
        assert "aborted" in reasons
        assert reasons <= {"aborted", "expired", "overdue"}  # a worker that stalls adds the other two
        assert "(2 tries)" in log


def test_groups_of_a_killed_worker_go_to_the_next_one() -> None:
    with serving() as service:
        trained_prompts(service, 1)
        service.processes["reward"].send_signal(signal.SIGKILL)
        service.processes["reward"].wait()
        service.start("reward-again", "attach", "stage", "--name", "reward-0")
        assert trained_prompts(service, 4)
        service.processes["reward-again"].send_signal(signal.SIGTERM)
        assert service.processes["reward-again"].wait(timeout=60) == 0


def test_a_reward_that_cannot_be_imported_ends_the_worker_before_it_joins() -> None:
    with serving("reward.run=no_such_module_anywhere:reward") as service:
        assert service.processes["reward"].wait(timeout=60) == 2
        with TrainerClient(service.address) as trainer:
            trainer.join(Lineage(0), Version(0))
        assert [event["role"] for event in service.trace("attach")].count("stage") == 0


def test_a_worker_of_an_async_reward_has_as_many_groups_as_its_concurrency_has_calls_for() -> None:
    overrides = ("trajectories.shards=1", "reward.batch=1", "reward.concurrency=8", "reward.timeout_s=60")
    with (
        serving(f"reward.run={REWARDS}:crowd", *overrides) as service,
        TrainerClient(service.address) as trainer,
    ):
        trainer.join(Lineage(0), Version(0))
        trainer.publish_initial(WEIGHTS)
        batch = next(iter(trainer.batches(1)))
        assert batch.rewards.tolist() == [1.0] * 6


def packed(one: StageGroup) -> memoryview:
    return memoryview(pack(one.payload.to_arrays()))


def given(one: StageGroup, ticket: int) -> StageItem:
    """Describe a group whose packed payload travels in a frame."""
    sha = payload_digest((packed(one),))
    return StageItem(group=one.group, lease=LeaseId(1), ticket=ticket, row={}, frames=[], sha=sha)


class Shard:
    """Serve these groups to a stage once."""

    def __init__(self, *groups: StageGroup) -> None:
        self._groups = groups

    async def call(self, *_: object, **__: object) -> tuple[StageWork, list[memoryview]]:
        items, blobs = [given(one, 1) for one in self._groups], [packed(one) for one in self._groups]
        return StageWork(items=items), blobs


class Broken:
    together: ClassVar[bool] = True

    async def make(self, groups: Sequence[StageGroup]) -> Sequence[StageOutcome]:
        raise MemoryError("Unable to allocate 8 GiB")

    async def accepted(self, groups: Sequence[StageGroup]) -> None: ...


async def test_a_stage_that_fails_names_the_groups_that_it_ends_at(caplog: pytest.LogCaptureFixture) -> None:
    worker = StageWorker(worker=WorkerId("critic-0.x"), name="critic", stage=Broken(), max_groups=4)
    shard: Any = Shard(group(3), group(8))
    with pytest.raises(ExceptionGroup) as ended:
        await worker.serve([shard])
    assert ended.group_contains(MemoryError)
    own = [record.getMessage() for record in caplog.records if record.name == StageWorker.__module__]
    assert own == [
        "stage critic failed on groups 3, 8, they go to another worker: MemoryError('Unable to allocate 8 GiB'); "
        "lower trainer.micro_tokens"
    ]


class Stream:
    """Serve groups 1, 2, ... without end to a stage that takes them one by one; each group's number is its ticket."""

    def __init__(self, enough: int) -> None:
        self._last = 0
        self._enough = enough
        self.over = asyncio.Event()
        """Set once ``enough`` groups are finished."""
        self.asked: list[GetStageWork] = []
        self.finished: list[int] = []
        self.most = 0

    async def call(self, body: GetStageWork, **_: object) -> tuple[StageWork, list[memoryview]]:
        await asyncio.sleep(0)
        self.asked.append(body)
        numbers = range(self._last + 1, self._last + body.max_groups + 1)
        self._last += body.max_groups
        self.most = max(self.most, len(body.held) + body.max_groups)
        items = [given(group(number), number) for number in numbers]
        return StageWork(items=items), [packed(group(number)) for number in numbers]

    async def ask(self, body: PutStageResults, *_: object, **__: object) -> Results:
        self.finished += [result.ticket for result in body.results]
        if len(self.finished) >= self._enough:
            self.over.set()
        return Results(results=[Result()] * len(body.results))


class Slow:
    """Finish every group immediately except group 2, which never finishes."""

    together: ClassVar[bool] = False

    async def make(self, groups: Sequence[StageGroup]) -> Sequence[StageOutcome]:
        assert len(groups) == 1
        if groups[0].group == 2:
            await asyncio.Event().wait()
        return [{"reward": np.zeros(2, np.float32)}]

    async def accepted(self, groups: Sequence[StageGroup]) -> None: ...


async def test_a_slow_group_holds_up_its_own_place_only() -> None:
    worker = StageWorker(worker=WorkerId("reward-0.x"), name="reward", stage=Slow(), max_groups=3)
    stream = Stream(enough=20)
    shard: Any = stream
    serving = asyncio.create_task(worker.serve([shard]))
    async with asyncio.timeout(60):
        await stream.over.wait()
    serving.cancel()
    assert sorted(stream.finished)[:20] == [1, *range(3, 22)]  # all but the slow one
    assert stream.most == 3  # never more groups than places
    assert stream.asked[0].held == []
    assert all(2 in ask.held for ask in stream.asked[1:])  # it reports that it still works on group 2


class Late(Stream):
    """Answer each request after a long delay, because groups are missing or the server is far away."""

    def __init__(self, waited_ms: int) -> None:
        super().__init__(enough=1)
        self._waited_ms = waited_ms

    async def call(self, body: GetStageWork, **_: object) -> tuple[StageWork, list[memoryview]]:
        await asyncio.sleep(0.05)
        work, frames = await super().call(body)
        return msgspec.structs.replace(work, waited_ms=self._waited_ms), frames

    async def ask(self, body: Request, *_: object, **__: object) -> Any:
        return await super().ask(body) if isinstance(body, PutStageResults) else Pong()


@pytest.mark.parametrize(("waited_ms", "portion"), [(0, FIRST_BYTES // 2), (60_000, FIRST_BYTES)])
async def test_an_answer_that_is_long_on_its_way_makes_the_next_one_smaller(
    monkeypatch: pytest.MonkeyPatch, waited_ms: int, portion: int
) -> None:
    monkeypatch.setattr(portions, "LATE_S", 0.01)
    worker = StageWorker(worker=WorkerId("reward-0.x"), name="reward", stage=Whole(), max_groups=2)
    late = Late(waited_ms)
    shard: Any = late
    serving = asyncio.create_task(worker.serve([shard]))
    async with asyncio.timeout(60):
        while len(late.asked) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    serving.cancel()
    assert [ask.most_bytes for ask in late.asked[:2]] == [FIRST_BYTES, portion]


class Whole(Slow):
    """Finish the received groups together."""

    together: ClassVar[bool] = True

    async def make(self, groups: Sequence[StageGroup]) -> Sequence[StageOutcome]:
        return [{"reward": np.zeros(2, np.float32)}] * len(groups)


async def test_a_stage_that_makes_groups_together_gets_whole_batches() -> None:
    worker = StageWorker(worker=WorkerId("critic-0.x"), name="critic", stage=Whole(), max_groups=3)
    stream = Stream(enough=9)
    shard: Any = stream
    serving = asyncio.create_task(worker.serve([shard]))
    async with asyncio.timeout(60):
        await stream.over.wait()
    serving.cancel()
    assert {(ask.max_groups, tuple(ask.held)) for ask in stream.asked} == {(3, ())}
