"""Workloads of the dispatch benchmark and of the price list.

``long-tail`` is ``configs/long-tail.toml``. The others have the same lengths, 32 groups of 4 a batch, the decode cost
that the authors of StaleFlow fitted to Qwen3-30B-A3B, and transfers of the size of that model: 60 GiB over a 400 Gbit/s
network take 2 s, loading them 2 s, a token of prefill 20 µs.
"""

from pathlib import Path

from bench.coordination_world import COSTS
from staleflow.configs.loading.load import load
from staleflow.configs.schema import Config
from staleflow.sim.peers.compare import changed

LONG_TAIL = Path(__file__).parent.parent / "configs" / "long-tail.toml"

_GROUPS = (
    *(f"rollout.simulated.{one}" for one in COSTS["moe"]),
    "rollout.group_size=4",
    "trainer.batch_size=32",
    "simulation.prompt_tokens=200",
    "simulation.pull_s=2",
    "simulation.load_s=2",
    "simulation.prefill_s=2e-5",
)

_LARGE = ("rollout.group_size=16", "trainer.batch_size=8")

SHAPES: dict[str, tuple[str, ...]] = {
    "long-tail": (),
    "tail": (*_GROUPS, "rollout.workers=8", "rollout.max_inflight=64"),
    "slots": (*_GROUPS, "rollout.workers=3", "rollout.max_inflight=16"),
    "large groups": (*_GROUPS, *_LARGE, "rollout.workers=3", "rollout.max_inflight=16"),
    "cache": (*_GROUPS, "rollout.workers=2", "rollout.max_inflight=256", "simulation.kv_tokens=100000"),
}
"""``tail``: engines have room, and the longest trajectories limit the run. ``slots`` and ``cache``: the slots or the KV
cache of the engines limit it too, and samples queue. ``large groups``: as ``slots``, with 8 groups of 16."""


def shape(name: str, *overrides: str, seed: int, steps: int) -> Config:
    """Configuration of a run of one workload; ``overrides`` are applied last."""
    config = load(LONG_TAIL)
    # A report every second would double the processor time of a run and change little: a step takes a minute here.
    common = (f"seed={seed}", f"trainer.steps={steps}", "simulation.report_s=4")
    return changed(config, [*common, *SHAPES[name], *overrides])
