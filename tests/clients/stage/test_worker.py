"""A stage worker in a real service: what it makes of good groups, of bad ones, and what its death costs."""

import signal
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from staleflow.clients.stage.worker import Made, StageGroup, StageWorker
from staleflow.clients.trainer.client import TrainerClient
from staleflow.protocols.consistency.ids import LeaseId, Lineage, Version, WorkerId
from staleflow.protocols.wire.messages import StageItem, StageWork
from staleflow.protocols.wire.tensors import specs_and_frames
from tests.clients.stage.judged import group
from tests.clients.trainer.service import REWARDS, Service, serving

WEIGHTS = {"w": np.zeros(3, np.float32)}


def trained_prompts(service: Service, steps: int) -> set[str]:
    """The prompts of the next steps' batches, trained and committed."""
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
        assert {event["why"] for event in service.trace("release")} == {"aborted"}
        log = (service.run_dir / "logs" / "reward-0.log").read_text()
        assert "has no reward: the reward raised ValueError: cannot judge p" in log
        assert "(2 tries)" in log


def test_groups_of_a_killed_worker_go_to_the_next_one() -> None:
    with serving() as service:
        trained_prompts(service, 1)
        service.processes["reward"].send_signal(signal.SIGKILL)
        service.processes["reward"].wait()
        service.start("reward-again", "attach", "stage", "--name", "reward-0")
        assert trained_prompts(service, 4)
        service.processes["reward-again"].send_signal(signal.SIGTERM)
        assert service.processes["reward-again"].wait(timeout=8) == 0


def test_a_reward_that_cannot_be_imported_ends_the_worker_before_it_joins() -> None:
    with serving("reward.run=no_such_module_anywhere:reward") as service:
        assert service.processes["reward"].wait(timeout=60) == 2
        with TrainerClient(service.address) as trainer:
            trainer.join(Lineage(0), Version(0))
        assert [event["role"] for event in service.trace("attach")].count("stage") == 0


class Shard:
    """Has these groups for a stage, once."""

    def __init__(self, *groups: StageGroup) -> None:
        self._groups = groups

    async def call(self, *_: object, **__: object) -> tuple[StageWork, list[memoryview]]:
        items, frames = list[StageItem](), list[memoryview]()
        for one in self._groups:
            specs, more = specs_and_frames(one.payload.to_arrays())
            items.append(StageItem(group=one.group, lease=LeaseId(1), ticket=1, row={}, frames=specs))
            frames += more
        return StageWork(items=items), frames


class Broken:
    async def make(self, groups: Sequence[StageGroup]) -> Sequence[Made]:
        raise MemoryError("Unable to allocate 8 GiB")

    async def accepted(self, groups: Sequence[StageGroup]) -> None: ...


async def test_a_stage_that_fails_names_the_groups_that_it_ends_at(caplog: pytest.LogCaptureFixture) -> None:
    worker = StageWorker(worker=WorkerId("critic-0.x"), name="critic", stage=Broken(), max_groups=4)
    shard: Any = Shard(group(3), group(8))
    with pytest.raises(ExceptionGroup) as ended:
        await worker.serve([shard])
    assert ended.group_contains(MemoryError)
    assert caplog.messages == [
        "the critic stage fails at 3, 8, they go to another worker: MemoryError('Unable to allocate 8 GiB'); "
        "lower trainer.micro_tokens"
    ]
