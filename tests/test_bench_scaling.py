"""The benchmark of scaling charges scheduler, trajectory servers and wire, and shows where a fleet becomes slower."""

from bench.scaling import COSTS, HEAD, coordination, fleet, line
from staleflow.configs.costs import Costs, SchedulerCosts
from staleflow.configs.loading.cost_file import read_costs


def test_measured_costs_slow_a_small_fleet_hardly() -> None:
    one = fleet("short", 2, 2, coordination(read_costs(COSTS)), steps=5, seeds=1, free=True)
    [charged], [free] = one.charged, one.free
    assert charged.violations == free.violations == 0
    assert 0.0 < charged.shard_busy < charged.scheduler_busy < 0.02
    assert free.scheduler_busy == free.shard_busy == free.wire_busy == 0.0
    assert 0.8 < one.groups_per_min / one.free_groups_per_min < 1.2
    assert line(one).count("|") == HEAD.splitlines()[0].count("|")


def test_a_busy_scheduler_limits_a_fleet() -> None:
    costs = Costs(scheduler=SchedulerCosts(message_s=0.2))
    one = fleet("short", 2, 1, costs, steps=5, seeds=1, free=True)
    assert one.charged[0].scheduler_busy > 0.8
    assert one.groups_per_min < 0.7 * one.free_groups_per_min
