"""A simulation has the engines of the run."""

from pathlib import Path

from staleflow.configs.loading.load import load
from staleflow.sim.check import fleet

SIMULATED = Path(__file__).parent.parent.parent / "configs" / "simulated.toml"


def test_workers_of_pools_are_simulated_with_their_own_slots() -> None:
    pools = "rollout.pool=[{max_inflight=99}, {workers=2}]"
    engines = fleet(load(SIMULATED, ["rollout.workers=1", "rollout.max_inflight=32", pools]))
    assert [(engine.count, engine.slots) for engine in engines] == [(1, 99), (1, 32), (1, 32)]
    listed = "simulation.fleet=[{count=2, slots=64}]"
    assert [engine.slots for engine in fleet(load(SIMULATED, ["rollout.workers=1", pools, listed]))] == [64, 64]
