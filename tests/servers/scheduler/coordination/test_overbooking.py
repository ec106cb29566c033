"""An engine whose slots are free gets more groups than its capacity: the last samples of groups do not hold it."""

from pathlib import Path

import msgspec
import pytest

from staleflow.configs.schema import Config, Environment
from staleflow.protocols.coordination.overbooking import MAX_OVERBOOKING
from staleflow.protocols.wire.messages import Assign, Command
from tests.servers.scheduler.table import Seat, Table
from tests.servers.scheduler.world import config

CAPACITY = 2


class Engine(Seat):
    """An instance with groups of two, which wait in its engine until the test reports them as running."""

    def _obey(self, command: Command) -> None:
        super()._obey(command)
        if isinstance(command, Assign):
            self.stats = msgspec.structs.replace(self.stats, waiting=self.stats.waiting + 2)

    def groups(self, **stats: float) -> int:
        """Report; return the number of groups that it has then."""
        self.report(**stats)
        return len(self.holds())


def full(tmp_path: Path, settings: Config) -> Engine:
    """Return an engine with four slots and as many groups as its capacity."""
    engine = Engine(Table(tmp_path / "run", settings), "a", CAPACITY)
    assert engine.groups(slots=4) == CAPACITY
    assert engine.groups(running=4, waiting=0) == CAPACITY
    return engine


@pytest.fixture
def settings() -> Config:
    return config(batch_size=16, max_staleness=3)


def test_free_slots_are_filled_beyond_the_capacity(tmp_path: Path, settings: Config) -> None:
    engine = full(tmp_path, settings)
    assert engine.groups(running=2) == 3, "one group fills two free slots"
    assert engine.groups(running=3, waiting=0) == 4, "no slot stays free for want of a second sample"
    assert engine.groups(running=4, waiting=0) == 4
    engine.table.close()


@pytest.mark.parametrize("stats", [{"waiting": 1}, {"kv_used": 0.96}, {"running": 0}])
def test_an_engine_that_could_start_no_sample_gets_no_group(
    stats: dict[str, float], tmp_path: Path, settings: Config
) -> None:
    """Samples that wait beside free slots wait for the KV cache. An engine without samples has all of its groups on
    their way, to it or to their shard."""
    engine = full(tmp_path, settings)
    assert engine.groups(**{"running": 2, "waiting": 0, **stats}) == CAPACITY
    engine.table.close()


def test_the_number_of_groups_is_limited(tmp_path: Path, settings: Config) -> None:
    engine = full(tmp_path, settings)
    for _ in range(4 * MAX_OVERBOOKING):
        engine.report(slots=1000, running=1, waiting=0)
    assert len(engine.holds()) == MAX_OVERBOOKING * CAPACITY
    engine.table.close()


def test_episodes_at_a_tool_keep_their_places(tmp_path: Path, settings: Config) -> None:
    engine = full(tmp_path, msgspec.structs.replace(settings, environment=Environment(run="nobody:plays")))
    assert engine.groups(running=2) == CAPACITY
    engine.table.close()
