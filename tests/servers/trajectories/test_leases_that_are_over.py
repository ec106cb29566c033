"""A shard drops payload whose lease the scheduler has ended since the push, whatever its group becomes."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.messages import Op, RegisterPush, Result
from staleflow.protocols.wire.stages import REWARD, REWARD_COLUMN
from staleflow.servers.trajectories.registrar import Then
from staleflow.servers.trajectories.shard import Shard
from staleflow.servers.trajectories.store import Columns
from tests.servers.trajectories.test_slabs_in_a_drain import WORKERS, World, key_of


class Impatient:
    """A scheduler that accepts every push and has reassigned the group by the next message."""

    def add(self, op: Op, then: Then) -> None:
        then(Result() if isinstance(op, RegisterPush) else Result(code=Code.STALE_LEASE))


def is_judged(shard: Shard) -> None:
    """Finish the reward, so the shard requests a place in a batch."""
    (ticket,) = shard.queues[REWARD].take("reward-0.1", 1, now_s=0.0, seconds_each=1.0)
    reward = {REWARD_COLUMN: np.array([0.0, 1.0], np.float32)}
    shard.finish(Columns(ticket.key, REWARD, reward), ticket.number, "reward-0.1", lambda _: None)


def is_given_up(shard: Shard) -> None:
    """Give the group up, so the shard releases it."""
    shard.give_up([key_of(1)], "its judge is gone")


@pytest.mark.parametrize("becomes", [is_judged, is_given_up], ids=["occupy", "release"])
def test_a_payload_whose_lease_is_over_is_forgotten(tmp_path: Path, becomes: Callable[[Shard], None]) -> None:
    world = World(tmp_path, scheduler=Impatient())
    world.push(WORKERS[0], 1)
    world.shard.commit()
    assert world.told == [None]
    becomes(world.shard)
    world.shard.commit()
    world.shard.commit()
    assert not [*world.shard.holdings]
    with world.store.read() as rows:
        assert rows.count("payloads") == 0
